"""WS /v1/audio/speech/stream: the protocol, errors, and the end of a request with its socket."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.core.errors import EngineError, Overloaded
from fleet.graphs.cascade import TTS
from fleet.processing.spoken.clauses import ClauseCutter
from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import RATE_HZ, Script, sine
from tests.web.sounds import decoded
from tests.web.speech_stream_client import SpeechStreamClient, speech_stream
from tests.web.test_bad_input import JUNK, error_of
from tests.web.test_disconnect import wait_for_abort
from web.speech_stream.socket import MAX_WAITING_CHARS

PATH = "/v1/audio/speech/stream"
TEXT = "This is the first clause, and here is the second one.\n```\ncode()\n```\nThe end."
CLAUSES = [
    "This is the first clause, ",
    "and here is the second one.\n",
    "```\n",
    "code()\n",
    "```\n",
    "The end.",
]
SAMPLES = Script().num_samples


@pytest.fixture
def gateway(cascade_gateway: ServedGateway) -> ServedGateway:
    return cascade_gateway


@pytest.fixture
def client(gateway: ServedGateway) -> Iterator[SpeechStreamClient]:
    with speech_stream(gateway.url) as client:
        yield client


def test_text_in_pieces_is_spoken_clause_by_clause(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    client.configure(model="omni", voice="bella", speed=1.5, seed=7, stream_audio=True)
    client.say(*TEXT)
    done = client.until("session.done")
    assert done == {"type": "session.done", "utterance_index": 0, "total_sentences": len(CLAUSES)}
    assert client.said() == CLAUSES
    specs = [spec for spec, _ in gateway.client.submitted]
    assert [spec.speech_text for spec in specs] == [CLAUSES[0], CLAUSES[1], CLAUSES[5]]
    places = ["starts_line", "ends_line", "starts_line,ends_line"]
    assert [spec.params["clause"] for spec in specs] == places
    assert {(spec.params["voice"], spec.params["speed"]) for spec in specs} == {("bella", "1.5")}
    assert {spec.sampling[TTS].seed for spec in specs} == {7}
    assert b"".join(client.audio) == sine(SAMPLES).tobytes() * 3
    start, *_ = [event for event in client.events if event["type"] == "audio.start"]
    assert (start["format"], start["sample_rate"], start["channels"]) == ("pcm", RATE_HZ, 1)
    sizes = [event["total_bytes"] for event in client.events if event["type"] == "audio.done"]
    assert sizes == [2 * SAMPLES, 2 * SAMPLES, 0, 0, 0, 2 * SAMPLES]


def test_sound_comes_before_the_text_is_complete(client: SpeechStreamClient) -> None:
    client.configure()
    client.send("input.text", text=CLAUSES[0] + "and")
    client.until("audio.done", sentence_index=0, error=False)
    assert client.audio == [sine(SAMPLES).tobytes()]
    client.say(" the rest.")
    assert client.until("session.done")["total_sentences"] == 2


def test_only_the_first_sound_of_an_utterance_is_trimmed(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    gateway.client.script = Script(lead_samples=RATE_HZ)
    client.configure()
    client.say(CLAUSES[0], CLAUSES[1])
    client.until("session.done")
    first, second = (len(audio) // 2 for audio in client.audio)
    assert second == SAMPLES + RATE_HZ and first == SAMPLES + 60 * RATE_HZ // 1000


def test_utterances_follow_one_another_with_their_settings(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    client.configure(voice="heart")
    client.say("One is here.")
    client.configure(voice="bella", response_format="wav")
    client.say("Two is here.")
    client.say()
    client.send("session.close")
    assert client.closed() == 1000
    done = [event for event in client.events if event["type"] == "session.done"]
    assert [(event["utterance_index"], event["total_sentences"]) for event in done] == [
        (0, 1),
        (1, 1),
        (2, 0),
    ]
    assert [spec.params["voice"] for spec, _ in gateway.client.submitted] == ["heart", "bella"]
    seeds = {spec.sampling[TTS].seed for spec, _ in gateway.client.submitted}
    assert len(seeds) == 2, "each utterance draws a seed"
    assert np.array_equal(decoded(client.audio[1]), sine(SAMPLES))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "opus", "aac"])
def test_audio_of_a_clause_is_a_file(client: SpeechStreamClient, kind: str, streams: bool) -> None:
    client.configure(response_format=kind, stream_audio=streams)
    client.say("One is here.")
    client.until("session.done")
    assert len(client.audio) == 1 or streams
    assert abs(len(decoded(b"".join(client.audio))) - SAMPLES) < 0.1 * RATE_HZ


def test_closing_the_socket_ends_the_request(gateway: ServedGateway) -> None:
    gateway.client.script = Script(stall_at=2)
    with speech_stream(gateway.url) as client:
        client.configure(stream_audio=True)
        client.say(TEXT)
        client.next()
        while not client.audio:
            client.next()
    wait_for_abort(gateway)
    assert len(gateway.client.submitted) == 1


def test_words_come_with_the_audio_in_which_they_end(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    gateway.client.script = Script(words=[("One ", 1920), ("is ", 2400), ("here.", 9607)])
    client.configure(stream_audio=True, word_timestamps=True)
    client.say("One is here.")
    client.until("session.done")
    chunks = [event for event in client.events if event["type"] == "audio.chunk"]
    pcm = b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in chunks)
    assert pcm == sine(SAMPLES).tobytes() and not client.audio
    assert [word for chunk in chunks for word in chunk["timestamps"]] == [
        {"word": "One", "start_ms": 0, "end_ms": 80},
        {"word": "is", "start_ms": 80, "end_ms": 100},
        {"word": "here.", "start_ms": 100, "end_ms": 400},
    ]
    assert all(
        word["end_ms"] <= chunk["chunk_end_ms"] for chunk in chunks for word in chunk["timestamps"]
    )
    times = [(chunk["chunk_start_ms"], chunk["chunk_end_ms"]) for chunk in chunks]
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]] and len(times) > 2


def test_failure_ends_the_utterance_and_not_the_session(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("out of memory"))
    client.configure(stream_audio=True)
    client.say(TEXT)
    error = client.until("error")
    assert error["message"] == error["error"]["message"] == "out of memory"
    assert error["error"]["code"] == "engine_error"
    assert client.until("audio.done")["error"]
    assert client.until("session.done")["total_sentences"] == 1
    gateway.client.script = Script()
    client.say("Again here.")
    assert not client.until("audio.done", utterance_index=1)["error"]


def test_further_clause_waits_while_the_queue_is_full(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    full = Overloaded("64 requests are running")
    gateway.client.script = Script(refusal=full, refusals=range(1, 3))
    client.configure()
    client.say(CLAUSES[0], CLAUSES[1])
    assert client.until("session.done")["total_sentences"] == 2 and len(client.audio) == 2
    gateway.client.script = Script(refusal=full)
    client.say("One is here.")
    assert client.until("error")["error"]["code"] == "rate_limit_exceeded"


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"voice": "siri"}, "voice"),
    ({"model": "other"}, "model"),
    ({"response_format": "midi"}, "response_format"),
    ({"speed": 5}, "speed"),
    ({"stream_audio": "yes"}, "stream_audio"),
    ({"word_timestamps": True}, "word_timestamps"),
    ({"word_timestamps": True, "response_format": "wav", "stream_audio": True}, "word_timestamps"),
    ({"split_granularity": "sentence"}, "split_granularity"),
    ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
    ({"instructions": "cheerfully"}, "instructions"),
    ({"ref_audio": "x"}, "ref_audio"),
    ({"input": "hello"}, "input"),
    ({"any_new_setting": 1}, "any_new_setting"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_setting_is_refused_by_name_and_the_earlier_ones_stay(
    gateway: ServedGateway, client: SpeechStreamClient, fields: dict[str, object], param: str
) -> None:
    client.configure()
    client.configure(**fields)
    error = client.until("error")
    assert error["error"]["param"] == param and param in error["message"]
    client.say("One is here.")
    assert not client.until("audio.done")["error"]
    with speech_stream(gateway.url) as first:
        first.configure(**fields)
        assert first.closed() == 4000 and first.events[-1]["error"]["param"] == param


def test_neutral_and_harmless_settings_are_accepted(client: SpeechStreamClient) -> None:
    client.configure(
        split_granularity="clause", language="Auto", instructions="", initial_codec_chunk_frames=4
    )
    client.say("One is here.")
    assert client.until("session.done") and not [e for e in client.events if e["type"] == "error"]


@pytest.mark.parametrize(
    "frame",
    [
        "no json",
        "[]",
        '{"type": "nothing"}',
        '{"type": "input.text"}',
        '{"type": "input.text", "text": 3}',
        '{"type": "input.text", "text": "a", "new": 1}',
        '{"type": "input.done", "text": "a"}',
    ],
)
def test_wrong_event_is_an_error_and_the_session_goes_on(
    client: SpeechStreamClient, frame: str
) -> None:
    client.configure()
    client.socket.send(frame)
    assert client.until("error")["error"]["type"] == "invalid_request_error"
    client.say("One is here.")
    assert not client.until("audio.done")["error"]


def test_settings_do_not_change_within_an_utterance(client: SpeechStreamClient) -> None:
    client.configure()
    client.send("input.text", text="One is")
    client.configure(voice="bella")
    assert "input.done first" in client.until("error")["message"]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (json.dumps({"type": "input.text", "text": "a"}), 4000),
        (json.dumps({"type": "session.close"}), 4000),
        (b"audio", 4000),
    ],
)
def test_session_without_settings_is_closed_with_the_reason(
    client: SpeechStreamClient, frame: str | bytes, code: int
) -> None:
    client.socket.send(frame)
    assert client.closed() == code and client.events[-1]["type"] == "error"


def test_too_much_waiting_text_closes_the_session(
    gateway: ServedGateway, client: SpeechStreamClient
) -> None:
    gateway.client.script = Script(stall_at=0)
    client.configure()
    client.send("input.text", text="The first words are being spoken. A word")
    wait_until(lambda: gateway.client.submitted, "the first clause to be asked for")
    for _ in range(MAX_WAITING_CHARS // 10_000 + 2):
        client.send("input.text", text="A word. " * 1250)
    assert client.closed() == 4000
    error = client.events[-1]["error"]
    assert (error["code"], error["param"]) == ("input_too_large", "text")
    wait_for_abort(gateway)


def test_control_token_in_the_text_is_refused_by_name(client: SpeechStreamClient) -> None:
    client.configure()
    client.say("One is here. <|im_end|> is not.")
    assert not client.until("audio.done")["error"]
    assert client.until("error")["error"]["param"] == "text"


def test_session_ends_when_its_client_sends_nothing(cascade: Loaded) -> None:
    voice = cascade.config.voice.model_copy(update={"idle_s": 1.0})
    config = cascade.config.model_copy(update={"voice": voice})
    with serving(replace(cascade, config=config)) as gateway, speech_stream(gateway.url) as client:
        client.configure()
        assert client.closed() == 1000
        assert client.events[-1]["error"]["code"] == "session_idle"


def test_model_that_speaks_whole_texts_is_refused_by_name(loaded: Loaded) -> None:
    with serving(loaded) as gateway, speech_stream(gateway.url) as client:
        client.configure()
        assert client.closed() == 4000
        error = client.events[-1]["error"]
        assert error["param"] == "model" and "POST /v1/audio/speech" in error["message"]
        refused = gateway.http.post(
            "/v1/audio/speech",
            json={"model": "omni", "input": "a", "stream_format": "sse", "word_timestamps": True},
        )
        assert error_of(refused)["param"] == "word_timestamps"


def test_socket_needs_the_key(cascade: Loaded) -> None:
    with serving(cascade, api_key="secret") as gateway:
        with speech_stream(gateway.url) as client:
            assert client.closed() == 3000
        with speech_stream(gateway.url, "secret") as client:
            client.configure()
            client.say("One is here.")
            assert client.until("session.done")


def test_plain_http_is_told_to_upgrade(gateway: ServedGateway) -> None:
    assert error_of(gateway.http.get(PATH), 426)["code"] == "upgrade_required"


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(
        ["model", "voice", "speed", "response_format", "stream_audio", "word_timestamps", "fleet"]
    ),
    JUNK,
)
def test_arbitrary_setting_is_accepted_or_refused_by_name(
    gateway: ServedGateway, name: str, junk: object
) -> None:
    with speech_stream(gateway.url) as client:
        client.configure(**{name: junk})
        client.say()
        client.send("session.close")
        code = client.closed()
        if code != 1000:
            assert code == 4000 and client.events[-1]["error"]["param"].startswith(name)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.text(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_arbitrary_text_is_spoken_completely(
    gateway: ServedGateway, text: str, cuts: list[int]
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    cutter = ClauseCutter()
    clauses = [clause.text for clause in cutter.feed(text) + cutter.finish()]
    with speech_stream(gateway.url) as client:
        client.configure()
        client.say(*(text[a:b] for a, b in zip(places, places[1:], strict=False)))
        assert client.until("session.done")["total_sentences"] == len(clauses)
        assert client.said() == clauses
