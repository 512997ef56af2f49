"""Streamed speech equals the decode in one piece, for any length, chunking and batching; byte for
byte with invariant numerics.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fleet.core.errors import ConfigError, EngineError
from fleet.core.ids import EdgeName, RequestId, StageName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineOutput
from fleet.models.qwen3_omni.code2wav import Code2Wav, StreamState
from fleet.models.qwen3_omni.code2wav_config import Code2WavConfig, read_config
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.qwen3_omni.code2wav import AUDIO, build, to_pcm16
from tests.oracle.oracle import Oracle
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

FRAME_SAMPLES, LOOKAHEAD_SAMPLES = 1920, 555
LENGTHS = (1, 2, 3, 10, 59, 350)
RAMP = (2, 4, 8, 16, 25)
SETTLING_FRAMES = 10
"""Number of frames of context that the convolutions need."""
CHUNKINGS = {"one by one": (1,), "ramp": RAMP, "all at once": (10_000,)}
TOLERANCE = 2e-5
"""Tolerated error relative to the signal, both as RMS. `transformers` in float32 differs by 5e-6
from its own float64; measured here: 6e-6.
"""
CODES, DECODE = EdgeName("codes"), Walk("decode")

Codes = NDArray[np.int32]
Wave = NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def codes() -> Codes:
    """350 codec frames to decode."""
    return np.random.default_rng(0).integers(0, 128, (350, 16), dtype=np.int32)


@pytest.fixture(scope="module")
def whole(oracle: Oracle, codes: Codes) -> dict[int, Wave]:
    """Function that returns the oracle's wave of the first n frames."""
    return {
        num_frames: oracle.decode(codes[:num_frames].T.astype(np.int64))
        for num_frames in (*LENGTHS, 120)
    }


@pytest.fixture(scope="module")
def fast(folder: Path) -> BuiltStage:
    return build(stage_options(stage=StageName("code2wav"), checkpoint=folder))


@pytest.fixture(scope="module")
def invariant(folder: Path) -> BuiltStage:
    return build(
        stage_options(stage=StageName("code2wav"), checkpoint=folder, numerics="invariant")
    )


@dataclass(slots=True)
class WaveCollector:
    """Codec task of one request, with its remaining chunks and its output so far."""

    task: TaskAdapter
    chunks: Iterator[tuple[Codes, bool]]
    waves: list[Wave] = field(default_factory=list[Wave])
    items: list[EdgeItem] = field(default_factory=list[EdgeItem])

    def wave(self) -> Wave:
        return np.concatenate(self.waves) if self.waves else np.zeros(0, np.float32)

    def pcm(self) -> NDArray[np.int16]:
        made = [item.arrays["pcm"] for item in self.items if item.arrays]
        return np.concatenate(made) if made else np.zeros(0, np.int16)

    def add(self, output: EngineOutput) -> None:
        assert output.error is None
        assert not (self.items and self.items[-1].final), "an output after the final one"
        self.items += self.task.produce(output)
        self.waves += [output.arrays["wave"]] if output.arrays else []


def chunked(
    codes: Codes, sizes: Sequence[int], *, late_end: bool = False
) -> Iterator[tuple[Codes, bool]]:
    """Yield chunks of these sizes (the last size repeats), each with a flag that marks the final
    chunk. `late_end`: whether the final chunk is an additional empty one.
    """
    start, index = 0, 0
    while start < len(codes):
        end = start + sizes[min(index, len(sizes) - 1)]
        yield codes[start:end], end >= len(codes) and not late_end
        start, index = end, index + 1
    if late_end or not len(codes):
        yield codes[:0], True


def serve(
    stage: BuiltStage,
    answers: Mapping[str, Iterator[tuple[Codes, bool]]],
    steps_per_round: int = 1,
    logged: LoggedOutput = NO_OUTPUT,
) -> dict[str, WaveCollector]:
    """Feed every request one chunk per round, with engine steps in between, until all have ended.
    `logged`: earlier output, equal for all requests.
    """
    engine = stage.engine
    collectors: dict[str, WaveCollector] = {}
    for name, chunks in answers.items():
        task = stage.adapter(
            RequestSpec(id=RequestId(name), graph="qwen3_omni", prompt_ids=()), None
        )
        request, pieces = task.open(logged)
        assert not pieces
        engine.submit(request)
        collectors[name] = WaveCollector(task, chunks)
    fed = True
    while fed or engine.is_ready():
        fed = False
        for name, collector in collectors.items():
            if (chunk := next(collector.chunks, None)) is None:
                continue
            fed = True
            for piece in collector.task.consume(CODES, DECODE, {"codes": chunk[0]}, final=chunk[1]):
                engine.feed(RequestId(name), piece)
        for _ in range(steps_per_round):
            for output in engine.step() if engine.is_ready() else ():
                collectors[output.request_id].add(output)
    assert all(collector.items[-1].final for collector in collectors.values())
    assert engine.stats().running == 0
    return collectors


def serve_one(
    stage: BuiltStage, chunks: Iterator[tuple[Codes, bool]], logged: LoggedOutput = NO_OUTPUT
) -> WaveCollector:
    return serve(stage, {"only": chunks}, logged=logged)["only"]


def error_over_signal(wave: Wave, expected: Wave) -> float:
    assert wave.shape == expected.shape
    return float(
        np.sqrt(np.mean(np.square(wave - expected))) / np.sqrt(np.mean(np.square(expected)))
    )


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("num_frames", LENGTHS)
def test_streamed_audio_equals_one_whole_decode(
    num_frames: int, chunking: str, fast: BuiltStage, codes: Codes, whole: dict[int, Wave]
) -> None:
    collected = serve_one(fast, chunked(codes[:num_frames], CHUNKINGS[chunking]))
    assert len(collected.wave()) == FRAME_SAMPLES * num_frames - LOOKAHEAD_SAMPLES
    assert error_over_signal(collected.wave(), whole[num_frames]) < TOLERANCE
    assert (collected.pcm() == np.rint(collected.wave() * 32767)).all()
    assert np.abs(collected.pcm() - whole[num_frames] * 32767).max() < 2


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_end_may_arrive_after_the_last_frame(
    numerics: str, request: pytest.FixtureRequest, codes: Codes, whole: dict[int, Wave]
) -> None:
    collected = serve_one(
        request.getfixturevalue(numerics), chunked(codes[:10], (3,), late_end=True)
    )
    assert error_over_signal(collected.wave(), whole[10]) < TOLERANCE


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize(
    "num_known",
    [1, FRAME_SAMPLES * 14, FRAME_SAMPLES * 30 + 7, FRAME_SAMPLES * 120 - LOOKAHEAD_SAMPLES],
)
def test_audio_continues_where_its_log_ends_without_decoding_it_again(
    num_known: int,
    numerics: str,
    request: pytest.FixtureRequest,
    codes: Codes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage: BuiltStage = request.getfixturevalue(numerics)
    undisturbed = serve_one(stage, chunked(codes[:120], RAMP))
    decoded: list[int] = []

    def counted(
        self: Code2Wav, states: Sequence[StreamState], codes_BTQ: Codes
    ) -> tuple[list[StreamState], Wave]:
        decoded.append(codes_BTQ.shape[1])
        return decode(self, states, codes_BTQ)

    decode = Code2Wav.decode
    monkeypatch.setattr(Code2Wav, "decode", counted)
    logged = {(AUDIO, DECODE): {"pcm": undisturbed.pcm()[:num_known]}}
    collected = serve_one(stage, chunked(codes[:120], RAMP), logged)
    assert collected.pcm()[:num_known].tobytes() == undisturbed.pcm()[:num_known].tobytes()
    if numerics == "invariant":
        assert collected.pcm().tobytes() == undisturbed.pcm().tobytes()
    assert np.abs(collected.pcm().astype(np.int32) - undisturbed.pcm()).max() < 2
    assert sum(decoded) <= 120 - num_known // FRAME_SAMPLES + SETTLING_FRAMES + 2 * max(RAMP)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_answer_without_frames_is_an_empty_end(
    numerics: str, request: pytest.FixtureRequest, codes: Codes
) -> None:
    collected = serve_one(request.getfixturevalue(numerics), chunked(codes[:0], (1,)))
    assert [(item.edge, dict(item.arrays), item.final) for item in collected.items] == [
        ("audio", {}, True)
    ]


def test_eight_batched_answers_equal_each_alone(
    fast: BuiltStage, codes: Codes, oracle: Oracle
) -> None:
    lengths = (1, 2, 7, 25, 30, 59, 64, 100)
    parts = {str(n): codes[3 * n :][:n] for n in lengths}
    collected = serve(fast, {name: chunked(part, (5, 1, 9)) for name, part in parts.items()})
    for name, part in parts.items():
        alone = serve_one(fast, chunked(part, RAMP)).wave()
        assert error_over_signal(collected[name].wave(), alone) < TOLERANCE
        assert (
            error_over_signal(collected[name].wave(), oracle.decode(part.T.astype(np.int64)))
            < TOLERANCE
        )


def test_invariant_samples_are_byte_equal_for_any_chunking_and_batching(
    invariant: BuiltStage, codes: Codes, whole: dict[int, Wave]
) -> None:
    expected = serve_one(invariant, chunked(codes[:120], (10_000,)))
    sizes = [len(wave) for wave in expected.waves]
    assert [(size + FRAME_SAMPLES - 1) // FRAME_SAMPLES for size in sizes] == [
        2,
        4,
        8,
        16,
        25,
        25,
        25,
        15,
    ]
    assert error_over_signal(expected.wave(), whole[120]) < TOLERANCE
    chunkings = ((1,), RAMP, (7, 1, 30), (10_000,), (119,))
    together = {str(sizes): chunked(codes[:120], sizes) for sizes in chunkings}
    others = {f"other {n}": chunked(codes[n:][:n], (n, 1)) for n in (4, 40)}
    collected = serve(invariant, {**together, **others}, steps_per_round=3)
    for name in together:
        assert [len(wave) for wave in collected[name].waves] == sizes
        assert collected[name].wave().tobytes() == expected.wave().tobytes(), name
        assert collected[name].pcm().tobytes() == expected.pcm().tobytes(), name


def test_left_context_of_25_frames_is_inexact(
    folder: Path, codes: Codes, whole: dict[int, Wave]
) -> None:
    options = stage_options(
        stage=StageName("code2wav"), checkpoint=folder, extra={"left_context": 25}
    )
    approximate = serve_one(build(options), chunked(codes[:120], (25,))).wave()
    assert error_over_signal(approximate, whole[120]) > 1000 * TOLERANCE
    assert (
        error_over_signal(approximate[: 20 * FRAME_SAMPLES], whole[120][: 20 * FRAME_SAMPLES])
        < TOLERANCE
    )


def test_left_context_up_to_the_first_frame_is_exact(
    folder: Path, codes: Codes, whole: dict[int, Wave]
) -> None:
    options = stage_options(
        stage=StageName("code2wav"), checkpoint=folder, extra={"left_context": 400}
    )
    assert (
        error_over_signal(serve_one(build(options), chunked(codes[:59], RAMP)).wave(), whole[59])
        < TOLERANCE
    )


def test_code_out_of_range_fails_its_own_request_only(
    fast: BuiltStage, codes: Codes, whole: dict[int, Wave]
) -> None:
    spoiled = codes[:10].copy()
    spoiled[4, 3] = 128
    tasks = {
        name: fast.adapter(RequestSpec(id=RequestId(name), graph="qwen3_omni", prompt_ids=()), None)
        for name in "ab"
    }
    for (name, task), frames in zip(tasks.items(), (spoiled, codes[:10]), strict=True):
        fast.engine.submit(task.open()[0])
        for piece in task.consume(CODES, DECODE, {"codes": frames}, final=True):
            fast.engine.feed(RequestId(name), piece)
    outputs = {output.request_id: output for output in fast.engine.step()}
    error = outputs[RequestId("a")].error
    assert isinstance(error, EngineError)
    assert error.message == "codes: 128 at frame 4 of the chunk, codebook 3 is not in 0..127"
    assert tasks["a"].produce(outputs[RequestId("a")]) == ()
    assert error_over_signal(outputs[RequestId("b")].arrays["wave"], whole[10]) < TOLERANCE
    assert fast.engine.stats().running == 0


def test_code2wav_reads_its_own_weights_only(fast: BuiltStage, folder: Path) -> None:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    expected = {name for name in weight_map if name.startswith("code2wav.")}
    assert set(fast.weight_names) == expected
    assert len(fast.weight_names) == len(expected)


def test_bfloat16_audio_is_close_to_float32(
    folder: Path, codes: Codes, whole: dict[int, Wave]
) -> None:
    stage = build(stage_options(stage=StageName("code2wav"), checkpoint=folder, dtype="bfloat16"))
    assert error_over_signal(serve_one(stage, chunked(codes[:10], RAMP)).wave(), whole[10]) < 0.2


def test_a_folder_without_weights_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(stage_options(stage=StageName("code2wav"), checkpoint=tmp_path))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="weights"):
        build(stage_options(stage=StageName("code2wav"), checkpoint=tmp_path))


def test_pcm_is_rounded_and_clipped() -> None:
    wave = np.array([0.0, 1.0, -1.0, 1.5, -2.0, 0.5 / 32767, 1.6 / 32767], np.float32)
    assert to_pcm16(wave).tolist() == [0, 32767, -32767, 32767, -32767, 0, 2]


def small_decoder(**changes: Any) -> tuple[Any, Code2Wav]:
    """Return a decoder of `transformers` with random weights, and Fleet's decoder with equal
    weights.
    """
    modeling = import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    sizes: dict[str, Any] = {
        "codebook_size": 32,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_quantizers": 3,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "decoder_dim": 24,
        "upsample_rates": (4, 3),
        "upsampling_ratios": (2,),
    }
    sizes |= changes
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = modeling.Qwen3OmniMoeCode2Wav._from_config(
            modeling.Qwen3OmniMoeCode2WavConfig(**sizes)
        ).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("scale", "gamma")):
                parameter.fill_(0.5)
            elif parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    known = {
        name: value for name, value in sizes.items() if name in Code2WavConfig.__struct_fields__
    }
    return reference, Code2Wav(Code2WavConfig(**known), reference.state_dict().__getitem__)


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, {"upsample_rates": (5,), "upsampling_ratios": (2, 2)}]
)
def test_decoder_sizes_follow_the_config(changes: dict[str, Any]) -> None:
    reference, decoder = small_decoder(**changes)
    codes = np.random.default_rng(1).integers(0, 32, (40, 3), dtype=np.int32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(codes.T[None].astype(np.int64))).flatten().numpy()
    config = decoder.config
    assert len(expected) == 40 * config.samples_per_frame - config.lookahead_samples
    state: StreamState = decoder.open()
    waves: list[Wave] = []
    for part in np.split(codes, [1, 2, 9, 30]):
        (state,), wave = decoder.decode([state], part[None].copy())
        waves.append(wave[0])
    assert error_over_signal(np.concatenate(waves), expected) < TOLERANCE


def test_lookahead_equals_that_of_the_real_checkpoint(folder: Path) -> None:
    config = read_config(folder)
    assert (config.samples_per_frame, config.lookahead_samples) == (
        FRAME_SAMPLES,
        LOOKAHEAD_SAMPLES,
    )
