"""The Thinker on vLLM compared with the torch engine (which other tests compare with
`transformers`): positions, hidden states and tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.core.ids import PREFILL, RequestId, StageName
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, Arrays, Engine, EngineInput, EngineRequest
from fleet.models.qwen3_omni.config import read_config
from fleet.models.qwen3_omni.thinker import WITH_ROWS
from fleet.processing.qwen3_omni import num_audio_positions
from fleet.stages.qwen3_omni import thinker
from tests.stage_options import stage_options

HOP, FRAMES_PER_CHUNK = 160, 100
"""Number of audio samples per mel frame, and number of frames that the encoder computes together
(13 positions).
"""
CLOSE = 1e-4
"""Tolerance of hidden states, which are at most about 8 and differ by about 1 between positions.
Both engines compute in float32 but in another order, by the number of threads and the other
requests of a step; up to 2.2e-5 was measured.
"""
TEXT_IDS = range(20, 500)


@dataclass(slots=True)
class Answered:
    ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    rows: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    tokens: list[int] = field(default_factory=list[int])
    num_reused: int = 0


@dataclass(frozen=True, slots=True)
class Asker:
    """Builds prompts of random text and audio clips."""

    audio_id: int
    features: Callable[[Sequence[NDArray[np.float32]]], dict[str, NDArray[np.float32]]]

    def prompt(self, seed: int, *lengths: int) -> Arrays:
        """Return a prompt with one clip per length in `lengths`, in samples."""
        rng = np.random.default_rng(seed)
        ids: list[int] = rng.choice(TEXT_IDS, 3).tolist()
        for count in num_audio_positions(lengths):
            ids += [*[self.audio_id] * count, *rng.choice(TEXT_IDS, 4).tolist()]
        ids += rng.choice(TEXT_IDS, 5).tolist()
        clips = [(rng.standard_normal(length) * 0.1).astype(np.float32) for length in lengths]
        return {"ids": np.array(ids, np.int32), **(self.features(clips) if clips else {})}


def build(engine: str, checkpoint: Path) -> Engine:
    options = stage_options(
        stage=StageName("thinker"),
        checkpoint=checkpoint,
        engine=engine,
        vllm={"kv_mib": 64},
        max_batch=8,
        kv_pages=64,
        page_size_tokens=32,
        prefill_chunk_tokens=64,
    )
    return thinker.build(options).engine


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path) -> tuple[Engine, Engine]:
    return build("vllm", tiny_checkpoint), build("torch", tiny_checkpoint)


@pytest.fixture(scope="module")
def asker(tiny_checkpoint: Path) -> Asker:
    return Asker(
        read_config(tiny_checkpoint).thinker_config.audio_token_id,
        thinker.feature_extractor(tiny_checkpoint),
    )


def run(
    engine: Engine,
    prompts: Sequence[Arrays],
    sampling: Sequence[Sampling],
    known: Sequence[Sequence[int]] = (),
) -> list[Answered]:
    """Run all requests concurrently. `known`: tokens that an earlier owner has sampled, for each
    request.
    """
    for number, (arrays, parameters) in enumerate(zip(prompts, sampling, strict=True)):
        request_id = RequestId(str(number))
        history = {TOKEN: np.array(known[number], np.int32)} if known else {}
        params = {NUM_POSITIONS: "1024", WITH_ROWS: "yes"}
        engine.submit(
            EngineRequest(
                request_id=request_id, sampling=parameters, params=params, history=history
            )
        )
        engine.feed(request_id, EngineInput(walk=PREFILL, arrays=arrays, final=True))
    answered = [Answered() for _ in prompts]
    while engine.is_ready():
        for output in engine.step():
            assert output.error is None, output.error
            one = answered[int(output.request_id)]
            one.num_reused += output.num_reused
            one.ids += output.arrays.get("ids", np.empty(0, np.int32)).tolist()
            one.positions += output.arrays.get("row_positions", np.empty(0, np.int32)).tolist()
            one.rows += [output.arrays["rows"]] if "rows" in output.arrays else []
            one.tokens += output.arrays.get(TOKEN, np.empty(0, np.int32)).tolist()
    return answered


def greedy(number: int, max_tokens: int) -> list[Sampling]:
    return [Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)] * number


def assert_alike(on_vllm: Sequence[Answered], on_torch: Sequence[Answered]) -> None:
    for one, other in zip(on_vllm, on_torch, strict=True):
        assert (one.ids, one.positions, one.tokens) == (other.ids, other.positions, other.tokens)
        if other.rows:
            assert np.abs(np.concatenate(one.rows) - np.concatenate(other.rows)).max() < CLOSE


def test_clips_of_every_length_in_frames_and_hops_have_equal_positions_and_rows(
    engines: tuple[Engine, Engine], asker: Asker
) -> None:
    """Clips of every length have equal positions and hidden states: every number of mel frames
    modulo a chunk of the encoder, in turn with every kind of partial frame.
    """
    remainders = (0, 1, 79, 80, 159)
    lengths = [
        8000 + HOP * frames + remainders[frames % len(remainders)]
        for frames in range(FRAMES_PER_CHUNK)
    ]
    prompts = [asker.prompt(seed, length) for seed, length in enumerate(lengths)]
    on_vllm, on_torch = (run(engine, prompts, greedy(len(prompts), 2)) for engine in engines)
    assert_alike(on_vllm, on_torch)
    assert len({len(one.positions) for one in on_torch}) == 14, "from 7 to 20 positions"


def test_prompts_of_text_and_several_clips_have_equal_rows_and_tokens(
    engines: tuple[Engine, Engine], asker: Asker
) -> None:
    prompts = [
        asker.prompt(1),
        asker.prompt(2, 9000, 41011),
        asker.prompt(3, 80077),
        asker.prompt(4, 16000, 16000, 5000),
    ]
    on_vllm, on_torch = (run(engine, prompts, greedy(len(prompts), 40)) for engine in engines)
    assert_alike(on_vllm, on_torch)


def test_positions_from_the_prefix_cache_have_rows(
    engines: tuple[Engine, Engine], asker: Asker
) -> None:
    prompts = [asker.prompt(11, 60000), asker.prompt(12, 30011, 30000)]
    first, again = (run(engines[0], prompts, greedy(2, 8)) for _ in range(2))
    assert all(one.num_reused >= 32 for one in again)
    assert_alike(again, first)


def test_sampled_answers_equal_those_of_torch_and_continue_unchanged(
    engines: tuple[Engine, Engine], asker: Asker
) -> None:
    prompts = [asker.prompt(seed, *([20000] * (seed % 2))) for seed in range(8)]
    sampling = [
        Sampling(
            max_tokens=40,
            temperature=(0.0, 0.7, 1.0, 1.3)[seed % 4],
            top_k=(0, 20, 50)[seed % 3],
            top_p=(1.0, 0.8)[seed % 2],
            seed=seed,
            frequency_penalty=(0.0, 0.5)[seed % 2],
            presence_penalty=(0.3, 0.0)[seed % 2],
            repetition_penalty=(1.0, 1.1)[seed // 4],
            min_tokens=seed,
        )
        for seed in range(8)
    ]
    on_vllm, on_torch = (run(engine, prompts, sampling) for engine in engines)
    assert [one.tokens for one in on_vllm] == [one.tokens for one in on_torch]
    for num_known in (1, 9, 39):
        continued = run(engines[0], prompts, sampling, [one.tokens[:num_known] for one in on_vllm])
        assert_alike(continued, on_vllm)


def test_prompt_with_other_positions_than_its_clips_is_refused_and_others_continue(
    engines: tuple[Engine, Engine], asker: Asker
) -> None:
    engine, good = engines[0], asker.prompt(21, 16000)
    bad = {**good, "ids": good["ids"][good["ids"] != asker.audio_id]}
    for name, arrays in (("good", good), ("bad", bad)):
        params = {NUM_POSITIONS: "1024", WITH_ROWS: "yes"}
        engine.submit(
            EngineRequest(request_id=RequestId(name), sampling=greedy(1, 4)[0], params=params)
        )
        engine.feed(RequestId(name), EngineInput(walk=PREFILL, arrays=arrays, final=True))
    outputs = [output for _ in range(20) for output in engine.step()]
    [error] = [output.error for output in outputs if output.request_id == "bad"]
    assert (
        error is not None and "the prompt has 0 audio positions, its clips have 13" in error.message
    )
    assert [output for output in outputs if output.request_id == "good"][-1].final
