"""Invariant numerics: a request's results depend, to the bit, neither on other requests nor on how
its prompt is cut into chunks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import fleet.engine.torch.answer as answer_module
import fleet.models.qwen3_omni.talker as talker_module
from fleet.core.ids import EdgeName
from fleet.engine.torch.sampling import RowSampling, draw
from fleet.lab.measure.twin import Answers
from tests.oracle.cases import CASES, Case
from tests.oracle.oracle import OracleAnswer
from tests.oracle.twins import (
    TwinRequests,
    ask,
    codes_of,
    speaking_stages,
    speaking_twin,
    tokens_of,
)

THOUGHT = EdgeName("thought")
SHORT = tuple(case for case in CASES if case.name in ("text", "audio", "three turns", "one token"))


@dataclass(slots=True)
class Bits:
    """Results of a run: logits by noise key (request, stage and index), accept-layer hidden states,
    and answers by case.
    """

    logits: dict[int, bytes] = field(default_factory=dict[int, bytes])
    rows: dict[str, bytes] = field(default_factory=dict[str, bytes])
    answers: dict[str, tuple[list[int], list[list[int]]]] = field(
        default_factory=dict[str, tuple[list[int], list[list[int]]]]
    )

    def read(self, asked: TwinRequests, answers: Answers) -> None:
        for case, spec in zip(asked.cases, asked.specs, strict=True):
            rows = [arrays["rows"] for arrays in answers[spec.id][THOUGHT] if "rows" in arrays]
            self.rows[case.name] = np.concatenate(rows).tobytes() if rows else b""
            self.answers[case.name] = (
                tokens_of(answers, spec.id),
                codes_of(answers, spec.id).tolist(),
            )


@pytest.fixture
def run(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bits]:
    """Run groups of cases one after another, each group concurrently; return the results."""

    def once(groups: list[list[Case]], chunk: int, temperature: float, kv_pages: int = 512) -> Bits:
        bits = Bits()

        def recording(logits: Tensor, draws: list[RowSampling], **more: object) -> Tensor:
            for plan, row in zip(draws, logits, strict=True):
                bits.logits[plan.noise_key] = row.numpy().tobytes()
            return draw(logits, draws, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(answer_module, "draw", recording)
        monkeypatch.setattr(talker_module, "draw", recording)
        built = speaking_stages(
            tiny_checkpoint, numerics="invariant", prefill_chunk_tokens=chunk, kv_pages=kv_pages
        )
        everything = ask(tiny_checkpoint, SHORT, temperature=temperature)
        for group in groups:
            wanted = [n for n, case in enumerate(everything.cases) if case in group]
            asked = TwinRequests(
                cases=tuple(everything.cases[n] for n in wanted),
                specs=tuple(everything.specs[n] for n in wanted),
                blobs=everything.blobs,
            )
            bits.read(asked, speaking_twin(built).run(asked.specs, asked.blobs))
        return bits

    return once


@pytest.mark.one_in(2, "invariant batches")
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_invariant_bits_are_equal_for_every_batch_and_prompt_chunk(
    run: Callable[..., Bits], truth: Mapping[str, OracleAnswer], temperature: float
) -> None:
    alone = run([[case] for case in SHORT], 256, temperature)
    assert any(alone.rows.values())
    all_together, two_groups = [list(SHORT)], [list(SHORT[:2]), list(SHORT[2:])]
    # with 12 pages, requests are evicted and recomputed
    for groups, chunk, kv_pages in (
        (all_together, 1, 512),
        (two_groups, 7, 512),
        (all_together, 256, 12),
    ):
        together = run(groups, chunk, temperature, kv_pages)
        assert together.rows == alone.rows, f"accept-layer rows, prompt chunks of {chunk}"
        assert together.logits == alone.logits, f"logits, prompt chunks of {chunk}"
        assert together.answers == alone.answers
    if temperature == 0:
        for name, (tokens, codes) in alone.answers.items():
            assert tokens == truth[name].token_ids
            assert codes == truth[name].codes.tolist() or not truth[name].codes.size


def test_seed_changes_sampled_answers(run: Callable[..., Bits]) -> None:
    sampled, greedy = run([list(SHORT[:2])], 256, 0.9), run([list(SHORT[:2])], 256, 0.0)
    assert sampled.answers != greedy.answers
