"""The cascade's recogniser stage on a tiny random checkpoint: clips, transcripts, recovery."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray

from fleet.core.errors import BadInput, ConfigError
from fleet.core.ids import DECODE, EdgeName, RequestId
from fleet.core.request import AudioClip, RequestSpec, Sampling
from fleet.engine.base import Engine
from fleet.engine.recognizer import RecognizerEngine
from fleet.engine.torch.build import open_device
from fleet.graphs.cascade import ASR, HEARD, TEXT, TRANSCRIPT
from fleet.models.whisper.recognizer import load_recognizer
from fleet.models.whisper.tiny import write_tiny_whisper
from fleet.processing.timed_text import decode_reports
from fleet.processing.transcripts import Transcripts
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput
from fleet.stages.cascade.asr import build
from tests.stage_options import stage_options

Samples = NDArray[np.float32]
RATE_HZ = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def stage(folder: Path) -> BuiltStage:
    return build(stage_options(stage=ASR, checkpoint=folder, max_batch=4))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """The stage's engine without its judgement of speech, which noise does not pass."""
    where = open_device(device="cpu", dtype="float32", numerics="fast", threads=1)
    return RecognizerEngine(load_recognizer(folder, where)[0], max_batch=4)


def noise(seconds: float, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    at = np.arange(round(seconds * RATE_HZ))
    loud = np.abs(np.sin(at / (500 + 3000 * rng.random())))
    return (0.2 * loud * rng.standard_normal(len(at))).astype(np.float32)


def spec_of(
    clips: Sequence[Samples],
    outputs: Sequence[EdgeName] = (HEARD,),
    rate_hz: int = RATE_HZ,
    **fields: Any,
) -> tuple[RequestSpec, bytes]:
    ends = np.cumsum([len(clip) for clip in clips]).tolist()
    audio = tuple(
        AudioClip(offset_samples=end - len(clip), num_samples=len(clip), rate_hz=rate_hz)
        for end, clip in zip(ends, clips, strict=True)
    )
    spec = RequestSpec(
        id=RequestId("a"),
        graph="cascade",
        prompt_ids=(),
        audio=audio,
        outputs=tuple(outputs),
        sampling={ASR: Sampling(max_tokens=24)},
        **fields,
    )
    return spec, np.concatenate([*clips, np.zeros(0, np.float32)]).astype("<f4").tobytes()


def run(
    stage: BuiltStage,
    engine: Engine,
    spec: RequestSpec,
    blob: bytes,
    logged: LoggedOutput = NO_OUTPUT,
) -> list[EdgeItem]:
    task = stage.adapter(spec, blob)
    request, pieces = task.open(logged)
    engine.submit(request)
    for piece in pieces:
        engine.feed(spec.id, piece)
    items: list[EdgeItem] = []
    while engine.is_ready():
        for output in engine.step():
            assert output.error is None, output.error
            items += task.produce(output)
    return items


def content(items: Sequence[EdgeItem], edge: EdgeName = HEARD) -> list[dict[str, bytes]]:
    return [
        {name: array.tobytes() for name, array in item.arrays.items()}
        for item in items
        if item.edge == edge
    ]


def texts_of(items: Sequence[EdgeItem], num_clips: int) -> list[str]:
    transcripts = Transcripts(num_clips)
    for item in items:
        if item.edge == HEARD:
            transcripts.add(item.arrays)
    return transcripts.texts()


@pytest.mark.one_in(2, "recovery of transcripts")
@pytest.mark.parametrize("params", [{}, {"temperature": "0.8"}])
def test_recovery_after_any_item_gives_the_same_bytes(
    stage: BuiltStage, engine: Engine, params: dict[str, str]
) -> None:
    clips = [noise(4, 1), noise(0, 2), noise(32, 3), noise(2, 4)]
    spec, blob = spec_of(clips, (HEARD, TEXT), params=params)
    items = run(stage, engine, spec, blob)
    whole = content(items)
    assert whole == content(items, TRANSCRIPT) and 5 <= len(whole) <= 30
    assert [item.final for item in items] == [False] * (len(items) - 2) + [True, True]
    assert all(texts_of(items, 4)[number] for number in (0, 2, 3))
    for num_heard in range(len(whole) + 1):
        logged = {
            (edge, DECODE): joined([one for one in items if one.edge == edge][:count])
            for edge, count in ((HEARD, num_heard), (TRANSCRIPT, max(0, num_heard - 1)))
            if count
        }
        assert content(run(stage, engine, spec, blob, logged)) == whole


def joined(items: Sequence[EdgeItem]) -> dict[str, np.ndarray]:
    """Return the arrays of items as a log joins them, read-only as a log's are."""
    names = items[0].arrays
    arrays = {name: np.concatenate([one.arrays[name] for one in items]) for name in names}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def test_pieces_are_whole_characters_and_name_their_clip(stage: BuiltStage, engine: Engine) -> None:
    clips = [noise(2 + seed, seed) for seed in range(6)]
    spec, blob = spec_of(clips)
    items = run(stage, engine, spec, blob)
    assert [int(item.arrays["clip"][0]) for item in items] == list(range(6))
    for item in items:
        text = item.arrays["text"].tobytes().decode("utf-8")
        assert len(item.arrays["text"]) == int(item.arrays["sizes"][0])
        assert "<|" not in text and text == text.lstrip() and "\ufffd" not in text
    alone = [run(stage, engine, *spec_of([clip])) for clip in clips]
    assert texts_of(items, 6) == [texts_of(each, 1)[0] for each in alone]


def test_silence_gives_an_empty_transcript_for_each_requested_edge(stage: BuiltStage) -> None:
    spec, blob = spec_of([np.zeros(3 * RATE_HZ, np.float32), noise(2, 1)], (HEARD, TEXT))
    items = run(stage, stage.engine, spec, blob)
    assert texts_of(items, 2) == ["", ""]
    assert {item.edge for item in items if item.final} == {HEARD, TRANSCRIPT}
    only_heard = run(stage, stage.engine, *spec_of([noise(2, 1)], (HEARD,)))
    assert {item.edge for item in only_heard} == {HEARD}


def test_clips_of_another_rate_are_resampled(stage: BuiltStage, engine: Engine) -> None:
    wave = noise(3, 5)
    smooth = soxr.resample(soxr.resample(wave, RATE_HZ, 8000), 8000, RATE_HZ)
    double = soxr.resample(smooth, RATE_HZ, 2 * RATE_HZ)
    items = run(stage, engine, *spec_of([double], rate_hz=2 * RATE_HZ))
    expected = run(stage, engine, *spec_of([smooth.astype(np.float32)]))
    assert texts_of(items, 1) == texts_of(expected, 1) != [""]


@pytest.mark.parametrize("seconds", [7, 70])
def test_report_has_the_text_in_segments_and_words_with_ascending_times(
    stage: BuiltStage, engine: Engine, seconds: int
) -> None:
    """Also of a clip of several windows, whose times count from its beginning."""
    params = {"times": "yes", "language": "en", "temperature": "0.8"}
    spec, blob = spec_of([noise(seconds, 3)], params=params)
    items = run(stage, engine, spec, blob)
    plain = run(stage, engine, *spec_of([noise(seconds, 3)], params=params | {"times": ""}))
    without = run(stage, engine, *spec_of([noise(seconds, 3)], params={"language": "en"}))
    assert all("report" in item.arrays for item in (*items, *plain))
    assert not any("report" in item.arrays for item in without)
    reports = [one for item in items for one in decode_reports(item.arrays["report"].tobytes())]
    assert len(reports) == len(items) >= 1 + seconds // 31
    words = [word for report in reports for word in report.words]
    segments = [segment for report in reports for segment in report.segments]
    (text,) = texts_of(items, 1)
    assert "".join(segment.text for segment in segments).split() == text.split()
    assert "".join(word.word for word in words).split() == ["".join(text.split())]
    times = [at for word in words for at in (word.start, word.end)]
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= seconds and times[-1] > 2
    assert segments[-1].end == words[-1].end and segments[0].start == words[0].start
    assert segments[0].seek == 0 and {segment.temperature for segment in segments} == {0.8}
    assert all(-20 < one.avg_logprob < 0 <= one.no_speech_prob < 1 for one in segments)
    assert {report.language for report in reports} == {"en"}
    if seconds > 30:
        assert segments[-1].seek > 2900


def test_language_prompt_and_temperature_change_the_transcript(
    stage: BuiltStage, engine: Engine
) -> None:
    clips = [noise(3, seed) for seed in range(6)]
    found: set[str] = set()
    changes = ({"language": "ja"}, {"prompt": "Hello"}, {"temperature": "1.0"})
    for params in ({"language": "en"}, *({"language": "en"} | change for change in changes)):
        spec, blob = spec_of(clips, params=params)
        found.add(" ".join(texts_of(run(stage, engine, spec, blob), len(clips))))
    assert len(found) == 4


def test_unknown_language_is_refused_with_the_known_ones(stage: BuiltStage) -> None:
    spec, blob = spec_of([noise(1, 1)], params={"language": "klingon"})
    with pytest.raises(BadInput, match="language: 'klingon' .* knows .* de, en, es, fr") as refused:
        run(stage, stage.engine, spec, blob)
    assert refused.value.param == "language"


def test_incomplete_blob_is_refused(stage: BuiltStage) -> None:
    spec, blob = spec_of([noise(1, 1)])
    with pytest.raises(BadInput, match="need more samples"):
        stage.adapter(spec, blob[:-4]).open()


def test_unusable_checkpoints_and_settings_are_refused_by_name(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type 'llama'; the recogniser needs a Whisper"):
        build(stage_options(stage=ASR, checkpoint=tmp_path))
    options = stage_options(stage=ASR, checkpoint=folder, extra={"short_windows": 8})
    with pytest.raises(ConfigError, match=r"stages.asr.extra.short_windows: 8 is neither true"):
        build(options)
