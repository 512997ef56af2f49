"""Mutation tests of the comparison with the oracle: each common mistake must make it fail."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import Tensor

from fleet.config import load_config
from fleet.core.ids import StageName
from fleet.engine.base import EngineOutput
from fleet.engine.torch import attention_fast
from fleet.engine.torch.layout import Extent, positions_of
from fleet.graphs import ChunkPolicy, Edge, get_graph
from fleet.lab.measure.twin import SlowTwin
from fleet.models.qwen3_omni.code_predictor import CodePredictor
from fleet.models.qwen3_omni.roles import RoleIds, TalkerPrompt, talker_prompt
from fleet.models.qwen3_omni.talker import TalkerTask
from fleet.models.qwen3_omni.thinker import Thinker, ThinkerTask
from fleet.stages.base import BuiltStage
from fleet.stages.builders import build_options
from fleet.stages.qwen3_omni import code2wav, talker, thinker
from tests.oracle.cases import (
    AUDIO,
    CASES,
    CODES,
    TEXT,
    Case,
    expected,
    make_frontend,
    pcm16,
    spec_of,
)
from tests.oracle.oracle import Oracle, OracleAnswer

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

GRAPH = get_graph("qwen3_omni")
CASE = replace(next(case for case in CASES if case.name == "three turns"), tokens=20, frames=48)
"""A case with a system turn, two user turns, audio, earlier answers, and speech that outlasts the
text.
"""
LONG = replace(CASE, frames=110)


@pytest.fixture(scope="module")
def truth(tiny_checkpoint: Path) -> dict[int, OracleAnswer]:
    oracle, frontend = Oracle(tiny_checkpoint), make_frontend(tiny_checkpoint)
    return {case.frames: expected(oracle, *spec_of(case, frontend), case) for case in (CASE, LONG)}


def late_text(edge: Edge) -> ChunkPolicy:
    """Return an edge with a policy that sends answer tokens in bursts, to detect a Talker that does
    not wait for its text.
    """
    return ChunkPolicy(kind="ramp", ramp=(1, 1, 1, 6)) if edge.transitions else edge.policy


def matches(
    checkpoint: Path,
    truth: dict[int, OracleAnswer],
    case: Case = CASE,
    *,
    left_context: int | None = None,
    penalty: float = 1.05,
) -> bool:
    """Return True if the stages, run without a fleet, give the oracle's tokens, codes and
    samples.
    """
    mutation = (
        () if left_context is None else (f"stages.code2wav.extra.left_context={left_context}",)
    )
    config = load_config(None, ("device=cpu", "dtype=float32", *mutation))
    built: dict[StageName, BuiltStage] = {}
    for name, build in (
        ("thinker", thinker.build),
        ("talker", talker.build),
        ("code2wav", code2wav.build),
    ):
        built[StageName(name)] = build(build_options(config, StageName(name), checkpoint))
    spec, blob = spec_of(case, make_frontend(checkpoint))
    sampling = msgspec.structs.replace(
        spec.sampling[StageName("talker")], repetition_penalty=penalty
    )
    spec = msgspec.structs.replace(spec, sampling={**spec.sampling, StageName("talker"): sampling})
    answers = SlowTwin(GRAPH, built, late_text).run([spec], {spec.id: blob or b""})[spec.id]
    want = truth[case.frames]
    ids = np.concatenate([arrays["ids"] for arrays in answers[TEXT]]).tolist()
    codes = np.concatenate([arrays["codes"] for arrays in answers[CODES]]).T
    pcm = np.concatenate([arrays["pcm"] for arrays in answers[AUDIO]]).astype(np.int32)
    if ids != want.token_ids or codes.tolist() != want.codes.tolist() or len(pcm) != len(want.wave):
        return False
    return bool(np.abs(pcm - pcm16(want.wave)).max() <= 1)


def test_comparison_passes_without_mutation(
    tiny_checkpoint: Path, truth: dict[int, OracleAnswer]
) -> None:
    assert matches(tiny_checkpoint, truth)
    assert matches(tiny_checkpoint, truth, LONG)


def changing(
    owner: type, name: str, change: Callable[[Any, Any], Any]
) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mutation of the method `owner.name`: `change` gets the object and the method's
    result, and returns another result.
    """
    right: Callable[..., Any] = getattr(owner, name)

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        return change(self, right(self, *args, **options))

    return lambda patch: patch.setattr(owner, name, wrong)


def accept_layer(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    def move(thinker: Any, _result: None) -> None:
        thinker._accept_layer += step

    return changing(Thinker, "__init__", move)


def without_end_text(task: Any, _result: None) -> None:
    task._spoke_end = True


def end_text_twice(patch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def repeat(task: Any, text: Tensor | None) -> Tensor | None:
        if task._spoke_end and not times:
            times.append(1)
            task._spoke_end = False
        return text

    changing(TalkerTask, "_next_text", repeat)(patch)


def padding_without_text(task: Any, text: Tensor | None) -> Tensor | None:
    return task._program.pad_text if text is None else text


def decode_positions_plus_one(patch: pytest.MonkeyPatch) -> None:
    def wrong(extents: Sequence[Extent], pad_to: int | None = None) -> list[int]:
        moved = [
            msgspec.structs.replace(e, start=e.start + 1, stop=e.stop + 1)
            if e.start and e.num_rows == 1
            else e
            for e in extents
        ]
        return positions_of(moved, pad_to)

    patch.setattr(attention_fast, "positions_of", wrong)


def swapped_codebooks(_predictor: Any, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, total = result
    return codes[:, [0, 1, 3, 2, *range(4, codes.shape[1])]], total


def system_turn_kept(patch: pytest.MonkeyPatch) -> None:
    def wrong(prompt_ids: np.ndarray, roles: RoleIds) -> TalkerPrompt:
        right = talker_prompt(prompt_ids, roles)
        first_user = int(np.argmax(right.in_user_turn))
        kept = right.in_user_turn.copy()
        kept[:first_user] = True
        return replace(right, in_user_turn=kept)

    patch.setattr(talker, "talker_prompt", wrong)


def zeroed_rows(_task: Any, outputs: Sequence[EngineOutput]) -> Sequence[EngineOutput]:
    for output in outputs:
        if "rows" in output.arrays:
            output.arrays["rows"][:] = 0
    return outputs


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "accept layer one too early": accept_layer(-1),
    "accept layer one too late": accept_layer(+1),
    "no tts_eos": changing(TalkerTask, "__init__", without_end_text),
    "tts_eos twice": end_text_twice,
    "padding before the text is here": changing(TalkerTask, "_next_text", padding_without_text),
    "positions plus one": decode_positions_plus_one,
    "two residual codebooks swapped": changing(CodePredictor, "predict", swapped_codebooks),
    "system turn kept": system_turn_kept,
    "audio rows zeroed": changing(ThinkerTask, "on_computed", zeroed_rows),
}


@pytest.mark.one_in(2, "mutations")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_fails_with_mutation(
    tiny_checkpoint: Path,
    truth: dict[int, OracleAnswer],
    monkeypatch: pytest.MonkeyPatch,
    mutation: str,
) -> None:
    MUTATIONS[mutation](monkeypatch)
    assert not matches(tiny_checkpoint, truth)


def test_comparison_fails_without_repetition_penalty(
    tiny_checkpoint: Path, truth: dict[int, OracleAnswer]
) -> None:
    assert not matches(tiny_checkpoint, truth, penalty=1.0)


def test_comparison_fails_with_left_context_of_25_frames(
    tiny_checkpoint: Path, truth: dict[int, OracleAnswer]
) -> None:
    assert not matches(tiny_checkpoint, truth, LONG, left_context=25)
