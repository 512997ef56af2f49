"""POST /v1/audio/transcriptions at a gateway whose graph recognises speech by itself: times in
every format, prompt, and recordings that one request cannot hold.
"""

import io
from typing import Any, cast

import httpx
import numpy as np
import pytest
import soundfile
from openai.types.audio import TranscriptionVerbose

from fleet.core.errors import EngineError, Overloaded
from fleet.graphs.cascade import ASR
from fleet.processing.spooled_audio import SpooledAudio, pcm16
from fleet.processing.timed_text import Segment, TimedWord, WindowReport
from tests.web.conftest import LIMITS, Loaded, ServedGateway, serving
from tests.web.fake_client import Script
from tests.web.realtime.speech_samples import RATE_HZ, spoken
from tests.web.test_bad_input import error_of
from tests.web.test_disconnect import wait_for_abort
from tests.web.test_transcription import PATH, params, write_down
from web.openai import long_transcription

TEXT = "It is <7:30> & late. Good night."
WORDS = [
    TimedWord(word="It", start=0.1, end=0.2),
    TimedWord(word="night.", start=1.5, end=1.875),
]
SEGMENTS = [
    Segment(
        seek=0,
        start=start,
        end=end,
        text=text,
        tokens=[1, 2],
        temperature=0.0,
        avg_logprob=-0.25,
        compression_ratio=0.9,
        no_speech_prob=0.01,
    )
    for start, end, text in ((0.1, 1.0, " It is <7:30> & late."), (1.25, 1.875, " Good night."))
]
REPORT = WindowReport(language="en", segments=SEGMENTS, words=WORDS)


@pytest.fixture
def gateway(cascade_gateway: ServedGateway) -> ServedGateway:
    cascade_gateway.client.script = Script(heard=TEXT, report=REPORT)
    return cascade_gateway


def verbose(gateway: ServedGateway, *granularities: str) -> TranscriptionVerbose:
    fields = params(
        response_format="verbose_json", timestamp_granularities=cast(Any, list(granularities))
    )
    answer = cast(object, gateway.openai().audio.transcriptions.create(**fields))
    assert isinstance(answer, TranscriptionVerbose)
    return answer


def test_verbose_json_has_the_recognisers_figures(gateway: ServedGateway) -> None:
    answer = verbose(gateway, "segment", "word")
    assert (answer.text, answer.language, answer.duration) == (TEXT, "english", 2.0)
    first, second = answer.segments or []
    assert (first.id, second.id, second.seek) == (0, 1, 0)
    assert (second.start, second.end, second.text) == (1.25, 1.875, " Good night.")
    assert (first.avg_logprob, first.compression_ratio, first.no_speech_prob) == (-0.25, 0.9, 0.01)
    assert [(word.word, word.start, word.end) for word in answer.words or []] == [
        ("It", 0.1, 0.2),
        ("night.", 1.5, 1.875),
    ]
    assert "times" in gateway.client.submitted[0][0].params


def test_granularities_select_what_has_times(gateway: ServedGateway) -> None:
    only_words = verbose(gateway, "word")
    assert only_words.segments is None and len(only_words.words or []) == 2
    default = verbose(gateway)
    assert default.words is None and len(default.segments or []) == 2
    write_down(gateway)
    assert "times" not in gateway.client.submitted[-1][0].params, "json needs none"


def test_subtitles_have_one_cue_per_segment(gateway: ServedGateway) -> None:
    srt = write_down(gateway, response_format="srt")
    assert srt.text == (
        "1\n00:00:00,100 --> 00:00:01,000\nIt is <7:30> & late.\n\n"
        "2\n00:00:01,250 --> 00:00:01,875\nGood night.\n\n"
    )
    vtt = write_down(gateway, response_format="vtt")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text == (
        "WEBVTT\n\n00:00:00.100 --> 00:00:01.000\nIt is &lt;7:30&gt; &amp; late.\n\n"
        "00:00:01.250 --> 00:00:01.875\nGood night.\n\n"
    )
    assert cast(
        object, gateway.openai().audio.transcriptions.create(**params(response_format="srt"))
    )  # pyright: ignore


def test_prompt_reaches_the_recogniser(gateway: ServedGateway) -> None:
    write_down(gateway, prompt="Wexelblat, 7.30")
    write_down(gateway, prompt="[1, 2]")
    prompts = [spec.params.get("prompt") for spec, _ in gateway.client.submitted]
    assert prompts == ["Wexelblat, 7.30", "[1, 2]"]
    write_down(gateway, prompt="")
    assert "prompt" not in gateway.client.submitted[-1][0].params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "response_format"),
        (
            {"response_format": "verbose_json", "timestamp_granularities[]": "char"},
            "timestamp_granularities",
        ),
        ({"prompt": "x" * 9000}, "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, str], param: str
) -> None:
    assert error_of(write_down(gateway, None, **fields))["param"] == param
    assert not gateway.client.submitted


def test_silence_has_no_segments(gateway: ServedGateway) -> None:
    silent = pcm_file(np.zeros(2 * RATE_HZ, np.int16))
    answer = write_down(gateway, silent, response_format="verbose_json").json()
    assert (answer["text"], answer["segments"], answer["duration"]) == ("", [], 2.0)
    assert write_down(gateway, silent, response_format="srt").text == ""
    assert write_down(gateway, silent, response_format="vtt").text == "WEBVTT\n\n"
    assert not gateway.client.submitted


def pcm_file(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE_HZ, format="WAV")
    return buffer.getvalue()


LONG_S = 22.0


def long_recording() -> np.ndarray:
    """Return speech with a pause of 0.5 s in each 2.5 s."""
    samples = spoken(round(LONG_S * RATE_HZ)).copy()
    for start in range(2 * RATE_HZ, len(samples), 5 * RATE_HZ // 2):
        samples[start : start + RATE_HZ // 2] = 0
    return samples


def test_long_recording_is_recognised_in_pieces_cut_at_pauses(gateway: ServedGateway) -> None:
    assert LONG_S > 4 * LIMITS.max_audio_s
    answer = write_down(
        gateway,
        pcm_file(long_recording()),
        response_format="verbose_json",
        **{"timestamp_granularities[]": "word", "prompt": "Names"},
    )
    body = answer.json()
    specs = [spec for spec, _ in gateway.client.submitted]
    lengths = [clip.num_samples for spec in specs for clip in spec.audio]
    assert len(lengths) == len(specs) >= 5 and all(spec.stages == (ASR,) for spec in specs)
    assert max(lengths) <= LIMITS.max_audio_s * 16_000
    assert abs(sum(lengths) - LONG_S * 16_000) <= 2
    assert body["text"] == " ".join([TEXT] * len(specs))
    assert body["duration"] == pytest.approx(LONG_S, abs=0.001)
    starts = [word["start"] for word in body["words"]]
    begins = [start - WORDS[0].start for start in starts[:: len(WORDS)]]
    assert begins[0] == 0 and begins == sorted(begins)
    durations = sorted(np.diff([*begins, LONG_S]).tolist())
    assert durations == pytest.approx(sorted(length / 16_000 for length in lengths), abs=0.002)
    second = [begin + WORDS[1].start for begin in begins]
    assert starts[1 :: len(WORDS)] == pytest.approx(second, abs=0.002)
    assert [spec.params.get("language") for spec in specs] == [None, *["en"] * (len(specs) - 1)]
    assert all(spec.params["prompt"] == "Names" for spec in specs)


def test_streamed_long_recording_joins_to_the_whole_text(gateway: ServedGateway) -> None:
    file = ("a.wav", pcm_file(long_recording()))
    create = cast(Any, gateway.openai().audio.transcriptions.create)
    *deltas, done = list(create(model="omni", file=file, stream=True))
    num_pieces = len(gateway.client.submitted)
    assert done.text == "".join(event.delta for event in deltas) == " ".join([TEXT] * num_pieces)


def test_failure_of_a_piece_fails_the_transcription_and_ends_the_others(
    gateway: ServedGateway,
) -> None:
    gateway.client.script = Script(heard=TEXT, fail_at=3, failure=EngineError("out of memory"))
    answer = write_down(gateway, pcm_file(long_recording()))
    assert error_of(answer, 500)["code"] == "engine_error"
    assert len(gateway.client.submitted) == 1, "the language of the first piece is not known"


def test_later_piece_waits_for_a_place(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first piece is refused at once; a later one is tried again, and is there once."""
    monkeypatch.setattr(long_transcription, "RETRY_S", 0.01)
    gateway.client.script = Script(heard=TEXT, refusal=Overloaded("no place"), refusals=range(2, 6))
    answer = write_down(gateway, pcm_file(long_recording()))
    num_pieces = len(gateway.client.submitted)
    assert answer.json()["text"] == " ".join([TEXT] * num_pieces)
    assert gateway.client.num_asked == num_pieces + 4
    gateway.client.reset()
    gateway.client.script = Script(heard=TEXT, refusal=Overloaded("no place"))
    assert write_down(gateway, pcm_file(long_recording())).status_code == 429
    assert gateway.client.num_asked == 1


def test_recording_beyond_the_limit_of_long_ones_is_refused(cascade: Loaded) -> None:
    limits = cascade.config.limits.model_copy(update={"max_transcription_s": 10.0})
    config = cascade.config.model_copy(update={"limits": limits})
    short = Loaded(checkpoint=cascade.checkpoint, config=config, frontend=cascade.frontend)
    with serving(short) as gateway:
        error = error_of(write_down(gateway, pcm_file(long_recording())), 413)
    assert error["param"] == "file"
    assert "longer than 10 s (limits.max_transcription_s)" in str(error["message"])
    assert not gateway.client.submitted


def test_pieces_tile_the_recording_and_end_in_its_pauses() -> None:
    rng = np.random.default_rng(5)
    audio = SpooledAudio(16_000)
    pauses: list[int] = []
    for _ in range(40):
        loud = rng.normal(0, 0.2, rng.integers(16_000, 80_000))
        pause = rng.normal(0, 0.001, rng.integers(6_000, 12_000))
        pauses.append(audio.num_samples + len(loud))
        audio.append(pcm16(np.concatenate([loud, pause]).astype(np.float32)))
    pieces = list(audio.pieces())
    assert pieces[0][0] == 0 and pieces[-1][1] == audio.num_samples
    assert [end for _, end in pieces[:-1]] == [start for start, _ in pieces[1:]]
    for start, end in pieces[:-1]:
        assert 13 * 16_000 <= end - start <= 28 * 16_000
        assert any(begin < end < begin + 12_000 for begin in pauses)
    joined = np.concatenate([audio.read(start, end) for start, end in pieces])
    assert np.array_equal(joined, audio.read(0, audio.num_samples))


def test_client_that_leaves_ends_a_long_transcription(gateway: ServedGateway) -> None:
    gateway.client.script = Script(heard=TEXT, stall_at=1)
    with (
        httpx.Client(base_url=gateway.url, timeout=3) as leaving,
        pytest.raises(httpx.ReadTimeout),
    ):
        files = {"file": ("a.wav", pcm_file(long_recording()))}
        leaving.post(PATH, data={"model": "omni"}, files=files)
    wait_for_abort(gateway)
