"""The recogniser on CTranslate2 compared with the one in torch, which equals `generate()`.
Collected where the extra `voice` is installed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.core.errors import BadInput, ConfigError
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineRequest
from fleet.engine.recognizer import DETAILS, RecognizerEngine, Samples, WindowJob
from fleet.graphs.cascade import ASR
from fleet.models.whisper.on_ctranslate2 import CONVERTED, ConvertedRecognizer, ConvertedWindow
from fleet.models.whisper.recognizer import WhisperRecognizer, load_recognizer
from fleet.models.whisper.tiny import write_tiny_whisper
from fleet.stages.base import BuiltStage
from fleet.stages.cascade.asr import build
from tests.oracle.test_whisper import NUM_TOKENS, SENTENCE, job_of, noise, on_cpu, run_windows
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(6, "engines")

ENGLISH = {"language": "en"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def in_torch(folder: Path) -> WhisperRecognizer:
    return load_recognizer(folder, on_cpu())[0]


@pytest.fixture(scope="module")
def model(folder: Path) -> ConvertedRecognizer:
    return ConvertedRecognizer(folder, threads=1, compute_type="float32")


def run(model: ConvertedRecognizer, jobs: Sequence[WindowJob]) -> list[ConvertedWindow]:
    windows = [model.open(job) for job in jobs]
    while going := [
        window
        for window in windows
        if len(window.tokens) < NUM_TOKENS and model.end_token not in window.tokens[-1:]
    ]:
        model.advance(going)
    return windows


@pytest.mark.parametrize("timed", [False, True])
def test_windows_have_the_tokens_of_torch(
    model: ConvertedRecognizer, in_torch: WhisperRecognizer, timed: bool
) -> None:
    """Windows of several sizes, languages and prompts, open at a time."""
    jobs = [
        job_of(noise(0.8 * size, seed + size), size, ("en", "de")[seed % 2], timed=timed)
        for size in (8, 20, 30)
        for seed in range(3)
    ]
    jobs.append(job_of(noise(5, 7), 30, "es", params={"prompt": SENTENCE}))
    expected = run_windows(in_torch, jobs)
    found = run(model, jobs)
    assert [window.tokens for window in found] == [window.tokens for window in expected]
    assert len({tuple(window.tokens) for window in found}) == len(jobs)
    for window, other, job in zip(found, expected, jobs, strict=True):
        details = model.details(window, window.tokens)
        assert details.no_speech == pytest.approx(
            in_torch.details(other, other.tokens).no_speech, rel=1e-3
        )
        assert (np.diff(details.begins) >= 0).all() and details.begins[-1] <= job.num_samples
        assert len(details.begins) == len(details.logprobs) == len(window.tokens)
        assert (details.logprobs[:-1] <= 0).all()


def transcribed(
    model: ConvertedRecognizer,
    clips: Sequence[Samples],
    known: Sequence[int] = (),
    temperature: float = 0.0,
) -> list[int]:
    engine = RecognizerEngine(model, max_batch=4)
    request = RequestId("a")
    engine.submit(
        EngineRequest(
            request_id=request,
            sampling=Sampling(max_tokens=24, temperature=temperature),
            params=ENGLISH | {DETAILS: "yes"},
            history={TOKEN: np.array(known, np.int32)} if known else {},
        )
    )
    for number, clip in enumerate(clips, 1):
        arrays = {"samples": clip}
        piece = EngineInput(walk=Walk("decode"), arrays=arrays, final=number == len(clips))
        engine.feed(request, piece)
    tokens: list[int] = []
    while engine.is_ready():
        for output in engine.step():
            assert output.error is None, output.error
            tokens += output.arrays[TOKEN].tolist()
    return tokens


def test_recovery_after_any_window_gives_the_same_tokens(model: ConvertedRecognizer) -> None:
    clips = [noise(4, 1), noise(33, 2), noise(3, 3)]
    whole = transcribed(model, clips)
    ends = [at for at, token in enumerate(whole, 1) if token == model.end_token]
    assert len(ends) >= 4
    for end in ends:
        assert transcribed(model, clips, whole[:end]) == whole


def test_temperature_draws_and_keeps_what_is_sent(model: ConvertedRecognizer) -> None:
    clips = [noise(4, 1), noise(6, 2)]
    drawn = transcribed(model, clips, temperature=1.0)
    assert drawn != transcribed(model, clips)
    end = drawn.index(model.end_token) + 1
    assert transcribed(model, clips, drawn[:end], temperature=1.0)[:end] == drawn[:end]


def test_language_of_a_tiny_vocabulary_must_be_named(model: ConvertedRecognizer) -> None:
    with pytest.raises(BadInput, match="language: CTranslate2 detects no language"):
        model.check_request({})
    model.check_request(ENGLISH)
    with pytest.raises(BadInput, match="klingon"):
        model.check_request({"language": "klingon"})


def stage_of(folder: Path, **settings: Any) -> BuiltStage:
    options = stage_options(stage=ASR, checkpoint=folder, stage_engine="ctranslate2", **settings)
    return build(options)


def test_stage_runs_on_the_engine_that_the_deployment_names(folder: Path) -> None:
    assert stage_of(folder).engine.stats().running == 0
    with pytest.raises(ConfigError, match="compute_type.*'int3' is none of int8"):
        stage_of(folder, extra={"compute_type": "int3"})
    with pytest.raises(ConfigError, match="computes on cpu, not on cuda:0"):
        stage_of(folder, device="cuda:0")
    with pytest.raises(ConfigError, match="only engine ctranslate2 reads it"):
        build(stage_options(stage=ASR, checkpoint=folder, extra={"compute_type": "int8"}))


def test_converted_folder_in_the_checkpoint_is_used(folder: Path) -> None:
    (folder / CONVERTED).mkdir()
    (folder / CONVERTED / "model.bin").write_bytes(b"no model")
    with pytest.raises(RuntimeError):
        ConvertedRecognizer(folder, threads=1, compute_type="float32")
    (folder / CONVERTED / "model.bin").unlink()


def test_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ConfigError, match=r"install fleet-serving\[voice\], or use torch"):
        ConvertedRecognizer(folder, threads=1, compute_type="float32")
