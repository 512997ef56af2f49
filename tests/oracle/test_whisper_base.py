"""The recogniser with the weights of Whisper base: tokens of `generate()`, and words understood.

The weights are downloaded once and kept in pytest's cache.
"""

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from fleet.core.ids import DECODE, RequestId
from fleet.core.request import AudioClip, RequestSpec, Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineRequest
from fleet.engine.recognizer import RecognizerEngine
from fleet.engine.torch.build import open_device
from fleet.graphs.cascade import ASR, HEARD
from fleet.models.voices.hibari import HibariVoice
from fleet.models.whisper.recognizer import load_recognizer
from fleet.processing.audio import decode_clip
from fleet.processing.timed_text import TimedWord, decode_reports
from fleet.processing.transcripts import Transcripts
from fleet.stages.base import BuiltStage, EdgeItem
from fleet.stages.cascade.asr import build as build_stage
from tests.oracle.whisper_base import build
from tests.stage_options import stage_options
from tests.support import REPO
from web.realtime.audio.formats import PcmaFormat, PcmuFormat
from web.realtime.audio.input_buffer import AudioInputBuffer

pytestmark = pytest.mark.thorough

Samples = NDArray[np.float32]
RATE_HZ = 16_000
SPEECH = Path(__file__).parent / "speech"
READ = {
    "austen_0880.ogg": "he was not an ill disposed young man",
    "austen_0890.ogg": (
        "unless to be rather cold hearted and rather selfish is to be ill disposed"
    ),
    "austen_0930.ogg": "he might even have been made amiable himself",
}
SPOKEN = (
    "What is the capital of France?",
    "Please turn off the lights in the kitchen.",
    "How far is it from the Earth to the Moon?",
    "Could you remind me to call my mother tomorrow morning?",
    "I would like to know why the sky is blue.",
    "The train to the city was late again, and nobody told us why.",
    "My brother plays the guitar in a small band.",
    "Tell me something interesting about whales.",
)


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    cache = pytestconfig.cache
    assert cache is not None, "pytest runs without its cache"
    folder = cache.mkdir("whisper_base")
    if not (folder / "preprocessor_config.json").exists():
        build(folder)
    return folder


@pytest.fixture(scope="module")
def stage(folder: Path) -> BuiltStage:
    return build_stage(stage_options(stage=ASR, checkpoint=folder, max_batch=4))


@pytest.fixture(scope="module")
def read() -> dict[str, Samples]:
    """Recordings of a person, by their text."""
    return {
        text: decode_clip((SPEECH / name).read_bytes(), rate_hz=RATE_HZ, max_s=60, where=name)
        for name, text in READ.items()
    }


@pytest.fixture(scope="module")
def spoken() -> dict[str, Samples]:
    """Synthetic speech, by its text."""
    voice = cast(Any, import_module("hibari")).Hibari()
    return {
        text: soxr.resample(voice(text, seed=1), 24_000, RATE_HZ).astype(np.float32)
        for text in SPOKEN
    }


def transcribe(stage: BuiltStage, clips: Sequence[Samples]) -> list[str]:
    """Return the text of each clip."""
    transcripts = Transcripts(len(clips))
    for item in recognise(stage, clips):
        transcripts.add(item.arrays)
    return transcripts.texts()


def recognise(stage: BuiltStage, clips: Sequence[Samples], **params: str) -> list[EdgeItem]:
    ends = np.cumsum([len(clip) for clip in clips]).tolist()
    spec = RequestSpec(
        id=RequestId("a"),
        graph="cascade",
        prompt_ids=(),
        audio=tuple(
            AudioClip(offset_samples=end - len(clip), num_samples=len(clip), rate_hz=RATE_HZ)
            for end, clip in zip(ends, clips, strict=True)
        ),
        outputs=(HEARD,),
        params=params,
    )
    task = stage.adapter(spec, np.concatenate(clips).astype("<f4").tobytes())
    request, pieces = task.open()
    stage.engine.submit(request)
    for piece in pieces:
        stage.engine.feed(spec.id, piece)
    items: list[EdgeItem] = []
    while stage.engine.is_ready():
        for output in stage.engine.step():
            items += task.produce(output)
    return items


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def num_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the number of words inserted, deleted and replaced."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(said, 1):
        last, row[0] = row[0], number
        for at, other in enumerate(heard, 1):
            last, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, last + (word != other))
    return row[-1]


def error_rate(said: Sequence[str], heard: Sequence[str]) -> float:
    pairs = [(words_of(text), words_of(other)) for text, other in zip(said, heard, strict=True)]
    return sum(num_errors(*pair) for pair in pairs) / sum(len(words) for words, _ in pairs)


def test_tokens_equal_generate_in_windows_of_thirty_seconds(
    folder: Path, read: dict[str, Samples], spoken: dict[str, Samples]
) -> None:
    oracle = cast(Any, WhisperForConditionalGeneration.from_pretrained(folder))
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    where = open_device(device="cpu", dtype="float32", numerics="fast", threads=1)
    model, _ = load_recognizer(folder, where, window_sizes_s=())
    engine = RecognizerEngine(model, max_batch=3)
    clips = [*read.values(), *list(spoken.values())[:3]]
    for number, clip in enumerate(clips):
        request = RequestId(str(number))
        params = {"language": "en"} if number % 2 else {}
        sampling = Sampling(max_tokens=200)
        engine.submit(EngineRequest(request_id=request, sampling=sampling, params=params))
        engine.feed(request, EngineInput(walk=DECODE, arrays={"samples": clip}, final=True))
    tokens: dict[str, list[int]] = {}
    while engine.is_ready():
        for output in engine.step():
            tokens[output.request_id] = output.arrays[TOKEN].tolist()
    for number, clip in enumerate(clips):
        features = extractor(clip, sampling_rate=RATE_HZ, return_tensors="pt").input_features
        how = {"language": "en"} if number % 2 else {}
        (expected,) = oracle.generate(features, task="transcribe", **how).tolist()
        english = [] if number % 2 else [oracle.generation_config.lang_to_id["<|en|>"]]
        assert tokens[str(number)] == [*english, *expected, model.end_token]


def test_read_and_spoken_sentences_are_understood(
    stage: BuiltStage, read: dict[str, Samples], spoken: dict[str, Samples]
) -> None:
    assert error_rate([*read], transcribe(stage, [*read.values()])) <= 0.07
    assert error_rate([*spoken], transcribe(stage, [*spoken.values()])) <= 0.03


@pytest.mark.parametrize("form", [PcmuFormat(), PcmaFormat()])
def test_sentences_are_understood_over_a_telephone(
    stage: BuiltStage,
    read: dict[str, Samples],
    spoken: dict[str, Samples],
    form: PcmuFormat | PcmaFormat,
) -> None:
    clips = read | spoken
    heard = transcribe(stage, [over_telephone(clip, form) for clip in clips.values()])
    rate = error_rate([*clips], heard)
    print(f"word error rate in {form}: {rate:.3f}")
    assert rate <= 0.05, heard


def over_telephone(clip: Samples, form: PcmuFormat | PcmaFormat) -> Samples:
    """Return a clip as a gateway recognises it if a voice session receives it in G.711."""
    narrow = soxr.resample(clip, RATE_HZ, form.rate) * 32_767
    buffer = AudioInputBuffer(form, None)
    for piece in buffer.split(form.of_pcm(np.clip(narrow, -32_768, 32_767).astype(np.int16))):
        buffer.append(piece)
    return (np.frombuffer(buffer.take_all(), "<i2") / 32_768).astype(np.float32)


def test_long_clip_is_understood_across_its_windows(
    stage: BuiltStage, spoken: dict[str, Samples]
) -> None:
    pause = np.zeros(RATE_HZ // 2, np.float32)
    sentences = [*spoken] * 2
    clip = np.concatenate([part for text in sentences for part in (spoken[text], pause)])
    assert len(clip) > 35 * RATE_HZ
    heard = transcribe(stage, [clip])
    assert error_rate([" ".join(sentences)], heard) <= 0.05


def test_silence_and_noise_have_no_transcript(stage: BuiltStage) -> None:
    rng = np.random.default_rng(0)
    noise = (0.05 * rng.standard_normal(4 * RATE_HZ)).astype(np.float32)
    assert transcribe(stage, [np.zeros(4 * RATE_HZ, np.float32), noise]) == ["", ""]


TIMED = (
    "What is the capital of France?",
    "My brother plays the guitar in a small band.",
    "If it rains on Sunday, we will stay at home and read.",
    "The old bridge was closed for three weeks, but the new one is open.",
    "Nobody remembers where the keys are, so we have to wait outside.",
)

SPACE_S = 0.05
"""Length of the space between two words, as the voice counts."""


def words_heard(stage: BuiltStage, clip: Samples) -> list[TimedWord]:
    items = recognise(stage, [clip], times="yes", language="en")
    reports = [one for item in items for one in decode_reports(item.arrays["report"].tobytes())]
    return [word for report in reports for word in report.words]


def test_words_begin_and_end_where_the_voice_says_them(stage: BuiltStage) -> None:
    """The voice tells where each word ends, a pause after it included; the next one begins a space
    later.
    """
    voice = HibariVoice(REPO / "fleet/checkpoints/hibari", ["heart"])
    late_ms: list[float] = []
    for text in TIMED:
        speech = voice.synthesize(text, "heart", speed=1.0, seed=1)
        clip = soxr.resample(speech.samples, voice.sample_rate_hz, RATE_HZ).astype(np.float32)
        words, ends_s = words_heard(stage, clip), speech.word_ends / voice.sample_rate_hz
        assert [word.word.lower() for word in words] == text.lower().split()
        for number, word in enumerate(words[:-1]):
            late_ms.append(1000 * (words[number + 1].start - ends_s[number] - SPACE_S))
            if word.word.isalpha():
                late_ms.append(1000 * (word.end - ends_s[number]))
    far = np.abs(late_ms)
    print(
        f"{len(far)} times: median {np.median(far):.0f} ms, {100 * (far <= 100).mean():.1f} % "
        f"within 100 ms, largest {far.max():.0f} ms, mean {np.mean(late_ms):.0f} ms"
    )
    assert np.median(far) <= 50 and (far <= 100).mean() >= 0.95 and far.max() <= 150
    assert abs(np.mean(late_ms)) <= 20
