"""The recogniser compared with `WhisperForConditionalGeneration.generate()` on a tiny random
checkpoint, in windows of its own size and in shorter ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineRequest
from fleet.engine.recognizer import RecognizerEngine, WindowJob
from fleet.engine.torch.build import open_device
from fleet.models.whisper.features import RATE_HZ, LogMel
from fleet.models.whisper.recognizer import WhisperRecognizer, WhisperWindow, load_recognizer
from fleet.models.whisper.tiny import write_tiny_whisper

pytestmark = pytest.mark.one_file_in(6, "engines")

Samples = NDArray[np.float32]
NUM_TOKENS = 60
LANGUAGES = ("en", "de", "")
SENTENCE = "The people of the great house, and their music"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWindow:
    """First window of a clip by `generate()`. `sampled`: tokens after the forced prefix, the end
    token included; `prefix`: the forced prefix. `kept`: tokens that belong to whole sentences;
    `next_s`: the second at which the next window begins, None without one.
    """

    prefix: list[int]
    sampled: list[int]
    kept: list[int]
    next_s: float | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(folder: Path) -> WhisperRecognizer:
    return load_recognizer(folder, on_cpu())[0]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[..., FirstWindow]:
    """Return a function that calls `generate()` with a window of `window_s` seconds."""

    @cache
    def reference(window_s: int) -> Any:
        whole = cast(Any, WhisperForConditionalGeneration.from_pretrained(folder))
        config = cast(Any, WhisperConfig.from_pretrained(folder))
        config.max_source_positions = 50 * window_s
        state = whole.state_dict()
        name = "model.encoder.embed_positions.weight"
        state[name] = state[name][: 50 * window_s].clone()
        shorter = cast(Any, WhisperForConditionalGeneration(config))
        shorter.load_state_dict(state)
        shorter.generation_config = whole.generation_config
        return shorter.eval()

    def expect(
        clip: Samples, *, window_s: int = 30, timed: bool = False, **how: Any
    ) -> FirstWindow:
        extractor = WhisperFeatureExtractor(chunk_length=window_s)
        features = extractor(clip, sampling_rate=RATE_HZ, return_tensors="pt").input_features
        answer = reference(window_s).generate(
            features,
            max_new_tokens=NUM_TOKENS,
            task="transcribe",
            return_timestamps=timed,
            return_segments=True,
            **how,
        )
        segments: list[dict[str, Any]] = answer["segments"][0]
        first = [one for one in segments if one["result"] is segments[0]["result"]]
        later = [one for one in segments if one["result"] is not segments[0]["result"]]
        begin = segments[0]["idxs"][0]
        first_time = reference(window_s).generation_config.no_timestamps_token_id + 1
        next_s = [float(one["start"]) - float(one["tokens"][0] - first_time) / 50 for one in later]
        tokens: list[int] = segments[0]["result"].tolist()
        return FirstWindow(
            prefix=tokens[:begin],
            sampled=tokens[begin:],
            kept=[token for one in first for token in one["tokens"].tolist()],
            next_s=next_s[0] if later else None,
        )

    return expect


def on_cpu(threads: int = 1) -> Any:
    return open_device(device="cpu", dtype="float32", numerics="fast", threads=threads)


def noise(seconds: float, seed: int) -> Samples:
    """Return noise whose loudness and colour change, so that no two moments sound alike."""
    rng = np.random.default_rng(seed)
    length = round(seconds * RATE_HZ)
    at = np.arange(length)
    loud = 0.02 + 0.2 * np.abs(np.sin(at / (500 + 3000 * rng.random())))
    tone = np.sin(at * at / (4e6 * (0.2 + rng.random())))
    return (loud * (0.5 * rng.standard_normal(length) + tone)).astype(np.float32)


def job_of(clip: Samples, window_s: int, language: str = "", **how: Any) -> WindowJob:
    how = {"params": {}, "sampling": Sampling(max_tokens=NUM_TOKENS)} | how
    return WindowJob(samples=clip, num_samples=window_s * RATE_HZ, language=language, **how)


def run_windows(model: WhisperRecognizer, jobs: Sequence[WindowJob]) -> list[WhisperWindow]:
    """Decode windows together; a window that has ended leaves the batch."""
    windows = [model.open(job) for job in jobs]
    while going := [
        window
        for window in windows
        if len(window.sampled) < NUM_TOKENS and model.end_token not in window.tokens[-1:]
    ]:
        model.advance(going)
    return windows


@pytest.mark.parametrize("seconds", [0.1, 3.3, 8.0, 29.99, 31.0])
@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_equal_the_feature_extractor(seconds: float, num_mels: int) -> None:
    for window_s in (8, 30):
        clip = noise(seconds, seed=num_mels)
        extractor = WhisperFeatureExtractor(feature_size=num_mels, chunk_length=window_s)
        (wanted,) = extractor(clip, sampling_rate=RATE_HZ)["input_features"]
        features = LogMel(num_mels, torch.device("cpu")).of(clip, window_s * RATE_HZ)
        np.testing.assert_allclose(features.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize("window_s", [30, 20, 8])
def test_windows_decoded_together_have_the_tokens_of_generate(
    model: WhisperRecognizer, oracle: Callable[..., FirstWindow], window_s: int
) -> None:
    clips = [noise(0.3 + 0.85 * window_s * n / 5, seed=n + window_s) for n in range(6)]
    languages = [LANGUAGES[n % 3] for n in range(6)]
    other = job_of(noise(4, seed=99), 8 if window_s == 30 else 30, "fr")
    jobs = [
        job_of(clip, window_s, language) for clip, language in zip(clips, languages, strict=True)
    ]
    windows = run_windows(model, [other, *jobs])[1:]
    for clip, language, window in zip(clips, languages, windows, strict=True):
        expected = oracle(clip, window_s=window_s, language=language or None)
        assert window.sampled == expected.sampled
        assert expected.prefix[1] == (window.tokens[0] if not language else expected.prefix[1])
        (alone,) = run_windows(model, [window.job])
        assert alone.tokens == window.tokens
    assert len({tuple(window.sampled) for window in windows}) >= 5


def test_timed_windows_have_the_tokens_and_the_end_that_generate_finds(
    model: WhisperRecognizer, oracle: Callable[..., FirstWindow]
) -> None:
    clips = [noise(30, seed=seed) for seed in range(12)]
    windows = run_windows(model, [job_of(clip, 30, "en", timed=True) for clip in clips])
    num_cut = 0
    for clip, window in zip(clips, windows, strict=True):
        expected = oracle(clip, timed=True, language="en")
        assert window.sampled == expected.sampled
        heard = model.hear(window.job, window.tokens)
        if expected.next_s is None or expected.next_s >= 1:
            num_cut += expected.next_s is not None
            assert [*heard.tokens[:-1]] == [
                token for token in expected.kept if token != model.end_token
            ]
            assert heard.num_samples == round((expected.next_s or 30) * RATE_HZ)
        else:
            assert heard.num_samples == len(clip)
        assert model.hear(window.job, heard.tokens) == heard
    assert num_cut >= 2


def test_prompt_conditions_the_tokens_as_in_generate(
    model: WhisperRecognizer, oracle: Callable[..., FirstWindow]
) -> None:
    clip = noise(5, seed=7)
    for prompt in (SENTENCE, f"  {SENTENCE * 20} "):
        (window,) = run_windows(model, [job_of(clip, 30, params={"prompt": prompt})])
        ids = torch.tensor(model._prompt(window.job))  # pyright: ignore[reportPrivateUsage]
        expected = oracle(clip, prompt_ids=ids)
        assert window.sampled == expected.sampled
        assert expected.prefix[: len(ids)] == ids.tolist()
        assert len(ids) <= 224


@pytest.mark.parametrize("max_batch", [1, 3])
def test_engine_returns_the_tokens_of_generate_for_concurrent_requests(
    model: WhisperRecognizer, oracle: Callable[..., FirstWindow], folder: Path, max_batch: int
) -> None:
    long_windows, _ = load_recognizer(folder, on_cpu(), window_sizes_s=())
    engine = RecognizerEngine(long_windows, max_batch=max_batch)
    clips = {RequestId(f"{n}"): noise(2 + 3 * n, seed=40 + n) for n in range(5)}
    for request, clip in clips.items():
        engine.submit(
            EngineRequest(
                request_id=request,
                sampling=Sampling(max_tokens=NUM_TOKENS),
                params={"language": "es"},
            )
        )
        piece = EngineInput(walk=Walk("decode"), arrays={"samples": clip}, final=True)
        engine.feed(request, piece)
    tokens: dict[RequestId, list[int]] = {}
    while engine.is_ready():
        for output in engine.step():
            tokens[output.request_id] = output.arrays[TOKEN].tolist()
    for request, clip in clips.items():
        sampled = oracle(clip, language="es").sampled
        ended = sampled if sampled[-1] == model.end_token else [*sampled, model.end_token]
        assert tokens[request] == ended
