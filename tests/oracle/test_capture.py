"""Captures in the torch engine: hidden states of every position as `transformers` computes them,
while concurrent answers stay the same.
"""

import math
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.errors import BadInput
from fleet.core.ids import RequestId
from fleet.core.request import Sampling
from fleet.drafts.eagle3.config import default_layer_ids
from fleet.drafts.trainer.samples import sample_of
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.lm_engine import LMEngine
from fleet.graphs.qwen3_omni import THINKER
from fleet.graphs.training import CAPTURE, TRAINED
from fleet.stages.qwen3_omni.thinker import build as build_thinker
from tests.oracle.cases import CASES, make_frontend, spec_of
from tests.oracle.oracle import Oracle, from_pretrained
from tests.oracle.test_text_engine import FAMILIES, PROMPTS, answers_of, stage, write_model
from tests.stage_options import stage_options

QWEN3 = next(family for family in FAMILIES if family.name == "Qwen3")
SAMPLING = Sampling(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_model(QWEN3, tmp_path_factory.mktemp("target") / "model")


def engine_of(target: Any, **options: Any) -> LMEngine[Any]:
    built = stage(target, **{"capture_share": 0.5, **options})
    assert isinstance(built.engine, LMEngine)
    return built.engine


def begin(
    engine: LMEngine[Any],
    name: str,
    prompt: list[int],
    answer: list[int],
    captured: tuple[str, ...],
) -> None:
    request = EngineRequest(
        request_id=RequestId(name),
        sampling=Sampling(max_tokens=len(answer)),
        captured=captured,
        params={NUM_POSITIONS: str(len(prompt) + len(answer))},
        history={TOKEN: np.array(answer, np.int32)},
    )
    engine.submit(request)
    engine.feed(
        request.request_id,
        EngineInput(walk=CAPTURE, arrays={"ids": np.array(prompt, np.int32)}, final=True),
    )


def finish(engine: LMEngine[Any]) -> list[EngineOutput]:
    found: list[EngineOutput] = []
    while engine.due_in_s() < math.inf:
        found += engine.step()
    return found


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("chunk", [3, 256])
def test_captured_rows_are_those_of_transformers(target: Any, numerics: str, chunk: int) -> None:
    engine, answer = (
        engine_of(target, numerics=numerics, prefill_chunk_tokens=chunk),
        [5, 9, 3, 7, 1],
    )
    prompt = list(PROMPTS[0])
    begin(engine, "c", prompt, answer, (TAPS, LAST_ROWS, INPUT_ROWS))
    outputs = finish(engine)
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    got = {
        name: np.concatenate([output.arrays[name] for output in outputs])
        for name in (TAPS, LAST_ROWS, INPUT_ROWS)
    }
    model = from_pretrained("AutoModelForCausalLM", target, dtype=torch.float32).eval()
    with torch.no_grad():
        done = model.model(
            input_ids=torch.tensor([prompt + answer]), use_cache=False, output_hidden_states=True
        )
    layers = default_layer_ids(len(done.hidden_states) - 1)
    expected = torch.cat([done.hidden_states[layer][0] for layer in layers], -1)
    assert len(got[TAPS]) == len(prompt) + len(answer)
    np.testing.assert_allclose(got[TAPS], expected.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        got[LAST_ROWS], done.last_hidden_state[0].numpy(), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
        got[INPUT_ROWS], done.hidden_states[0][0].numpy(), rtol=1e-3, atol=1e-4
    )
    assert engine.stats().running == 0 and engine.stats().kv.pages_used == 0


def test_answers_beside_captures_stay_the_same(target: Any) -> None:
    """Answers beside captures stay the same: byte-equal, in fixed tiles. With so few pages that
    captures are evicted, no row is returned twice.
    """
    expected = answers_of(stage(target, numerics="invariant"), PROMPTS, lambda _: SAMPLING)
    built = stage(
        target, capture_share=0.5, numerics="invariant", kv_pages=12, prefill_chunk_tokens=3
    )
    engine: Any = built.engine
    for number in range(3):
        begin(engine, f"c{number}", [3, 1, 4, 1, 5, number], [9, 2, 6], (TAPS,))
    real, rows = engine.step, dict[str, int]()

    def counting() -> list[EngineOutput]:
        outputs = list(real())
        for output in outputs:
            if output.request_id.startswith("c"):
                rows[output.request_id] = rows.get(output.request_id, 0) + len(output.arrays[TAPS])
        return [output for output in outputs if not output.request_id.startswith("c")]

    engine.step = counting
    assert answers_of(built, PROMPTS, lambda _: SAMPLING) == expected
    finish(engine)
    assert rows == {"c0": 9, "c1": 9, "c2": 9}
    assert engine.stats().kv.pages_used == 0


def test_captures_wait_for_answers_beyond_their_share(target: Any) -> None:
    built = stage(target, capture_share=0.0, prefill_chunk_tokens=3)
    engine: Any = built.engine
    begin(engine, "c", [3, 1, 4, 1, 5, 9], [2, 6], (TAPS,))
    answer = EngineRequest(
        request_id=RequestId("a"), sampling=SAMPLING, params={NUM_POSITIONS: "30"}
    )
    engine.submit(answer)
    engine.feed(
        answer.request_id,
        EngineInput(walk=CAPTURE, arrays={"ids": np.array([1, 2, 3], np.int32)}, final=True),
    )
    order = [output.request_id for output in finish(engine)]
    assert order == ["a"] * 12 + ["c"] * 3


def test_captures_leave_their_pages_to_answers(target: Any) -> None:
    """A new answer gets pages although an older capture holds most of them and may not continue
    beside answers. The capture continues later, and returns each row once.
    """
    engine = engine_of(target, capture_share=0.0, kv_pages=8, prefill_chunk_tokens=3)
    num_rows = 6 * engine.pool.page_size
    begin(engine, "c", [1 + number % 9 for number in range(num_rows - 2)], [2, 6], (TAPS,))
    outputs: list[EngineOutput] = []
    while engine.pool.num_used < 5:
        outputs += engine.step()
    answer = EngineRequest(
        request_id=RequestId("a"),
        sampling=SAMPLING,
        params={NUM_POSITIONS: str(5 * engine.pool.page_size)},
    )
    engine.submit(answer)
    ids = np.arange(1, 4 * engine.pool.page_size, dtype=np.int32) % 9
    engine.feed(answer.request_id, EngineInput(walk=CAPTURE, arrays={"ids": ids}, final=True))
    outputs += finish(engine)
    order: list[str] = [output.request_id for output in outputs]
    assert [name for name, _ in groupby(order)] == ["c", "a", "c"] and order.count("a") == 12
    assert (
        sum(len(output.arrays[TAPS]) for output in outputs if output.request_id == "c") == num_rows
    )
    assert engine.stats().kv.pages_used == 0


def test_capture_is_refused_where_none_are_computed(target: Any) -> None:
    engine: Any = stage(target).engine
    with pytest.raises(BadInput, match=r"training\.enabled: true"):
        begin(engine, "c", [1, 2, 3], [4], (TAPS,))


def test_rows_of_a_capture_with_audio_are_those_of_transformers(tiny_checkpoint: Path) -> None:
    """The rows of a capture with audio equal `transformers`. The sample contains the rows that
    entered the first layer, since an audio row is not the embedding of its token id. Taps, which
    depend on the Thinker's audio positions, are equal too.
    """
    case = next(each for each in CASES if each.name == "three turns")
    spec, blob = spec_of(case, make_frontend(tiny_checkpoint))
    answer = (5, 9, 3, 7, 1)
    built = build_thinker(
        stage_options(
            stage=THINKER, checkpoint=tiny_checkpoint, capture_share=0.5, prefill_chunk_tokens=16
        )
    )
    adapter = built.adapter(msgspec.structs.replace(spec, given=answer, outputs=(TRAINED,)), blob)
    request, pieces = adapter.open()
    built.engine.submit(request)
    for piece in pieces:
        built.engine.feed(spec.id, piece)
    items = [
        item
        for output in finish(cast("LMEngine[Any]", built.engine))
        for item in adapter.produce(output)
    ]
    sample = sample_of(spec.id, len(spec.prompt_ids), [item.arrays for item in items])
    oracle = Oracle(tiny_checkpoint)
    samples = np.frombuffer(blob or b"", dtype=np.float32)
    clips = [
        samples[clip.offset_samples : clip.offset_samples + clip.num_samples] for clip in spec.audio
    ]
    input_ids = torch.tensor([[*spec.prompt_ids, *answer]])
    with torch.no_grad():
        audio = oracle.audio_inputs(clips)
        done = oracle.model.thinker(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            output_hidden_states=True,
            **audio,
        )
    hidden = [each[0] for each in done.hidden_states]
    assert sample.embeddings_NH is not None and sample.last_NH is not None
    torch.testing.assert_close(sample.embeddings_NH, hidden[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        sample.taps_NT,
        torch.cat([hidden[layer] for layer in sample.layer_ids], -1),
        rtol=1e-3,
        atol=1e-4,
    )
    torch.testing.assert_close(sample.last_NH, hidden[-1], rtol=1e-3, atol=1e-4)
    is_audio = input_ids[0] == oracle.model.config.thinker_config.audio_token_id
    assert is_audio.sum() > 5 and not torch.equal(*sample.embeddings_NH[is_audio][:2]), (
        "rows of audio differ, their ids do not"
    )
