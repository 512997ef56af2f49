"""Text that is spoken while it arrives, on a real fleet: the bytes of the whole text, although a
worker or a gateway is killed.
"""

import random
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tests.e2e.fleets import ProcessFleet, fleet_up
from tests.e2e.gateways import another_gateway
from tests.support import wait_until
from tests.web.speech_stream_client import Event, SpeechStreamClient, speech_stream

pytestmark = pytest.mark.one_file_in(10, "processes")

SETTINGS = ("graph=cascade", "checkpoint=tiny", "device=cpu", "transfer.kind=redis", "web.port=0")
FIRST = "Good morning, "
TEXT = (
    f"{FIRST}this is a text that is spoken while it arrives. It costs $3.50, or 7:30 hours of\n"
    "work:\n\n* one thing, e.g. this,\n* and another.\n```py\nprint(1)\n```\nThat is all of it, "
    "said Dr. Smith, and went home by train, as usual, before the rain began."
)
SETTING = {"seed": 5, "stream_audio": True, "speed": 1.25}
NUM_SPLITS, NUM_TIMED = 4, 9


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path_factory.mktemp("fleet"), *SETTINGS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def whole(fleet: ProcessFleet) -> bytes:
    """The PCM of the whole text, spoken by one request."""
    body = {"model": "tiny", "input": TEXT, "response_format": "pcm", "seed": 5, "speed": 1.25}
    answer = httpx.post(f"{fleet.url}/v1/audio/speech", json=body, timeout=60)
    return answer.raise_for_status().content


def split(seed: int) -> list[str]:
    cuts = random.Random(seed).sample(range(1, len(TEXT)), seed * 10)
    places = [0, *sorted(cuts), len(TEXT)]
    return [TEXT[a:b] for a, b in zip(places, places[1:], strict=False)]


def finish(client: SpeechStreamClient, on_event: Callable[[Event], None]) -> bytes:
    """Return the audio of the utterance, after calling `on_event` for each of its events."""
    while True:
        event = client.next()
        if event is not None:
            assert event["type"] != "error", event
            on_event(event)
            if event["type"] == "session.done":
                return b"".join(client.audio)


@pytest.mark.parametrize("seed", range(NUM_SPLITS))
def test_streamed_text_has_the_bytes_of_the_whole_text(
    fleet: ProcessFleet, whole: bytes, seed: int
) -> None:
    with speech_stream(fleet.url) as client:
        client.configure(**SETTING)
        client.say(*split(seed))
        assert finish(client, lambda _: None) == whole
        assert "".join(client.said()) == TEXT


def test_killed_voice_changes_no_byte(fleet: ProcessFleet, whole: bytes) -> None:
    killed: list[int] = []

    def kill(event: Event) -> None:
        if event["type"] == "audio.start" and event["sentence_index"] in (1, 4):
            wait_until(lambda: "worker tts" in fleet.commands(), "the voice's process", 60)
            process = fleet.commands()["worker tts"]
            killed.append(process.pid)
            process.kill()

    with speech_stream(fleet.url) as client:
        client.configure(**SETTING)
        client.say(*split(2))
        assert finish(client, kill) == whole
    assert len(set(killed)) == 2


def test_client_of_a_killed_gateway_goes_on_at_another_one(
    fleet: ProcessFleet, whole: bytes
) -> None:
    """After the loss of its gateway a client sends the text again, and drops what it has."""
    with another_gateway(fleet) as (running, port):
        with speech_stream(f"http://127.0.0.1:{port}") as client, pytest.raises(ConnectionClosed):
            client.configure(**SETTING)
            client.say(TEXT)
            client.until("audio.done", sentence_index=1)
            running.process.kill()
            while True:
                client.next()
        received = b"".join(client.audio)
        assert received and whole.startswith(received)
    with speech_stream(fleet.url) as client:
        client.configure(**SETTING)
        client.say(TEXT)
        again = finish(client, lambda _: None)
    assert received + again[len(received) :] == whole


def test_words_have_increasing_times_within_the_audio(fleet: ProcessFleet, whole: bytes) -> None:
    with speech_stream(fleet.url) as client:
        client.configure(**SETTING, word_timestamps=True)
        client.say(*split(1))
        finish(client, lambda _: None)
    begin_ms, words, times = 0.0, list[str](), list[float]()
    for event in client.events:
        if event["type"] == "audio.chunk":
            words += [word["word"] for word in event["timestamps"]]
            times += [begin_ms + word["end_ms"] for word in event["timestamps"]]
        elif event["type"] == "audio.done":
            begin_ms += event["total_bytes"] / 48
    assert words == TEXT.replace("```py\nprint(1)\n```\n", "").split()
    assert all(end >= before - 1 for before, end in zip(times, times[1:], strict=False))
    assert times[-1] <= len(whole) / 48 + 1


def test_sound_comes_before_the_text_is_complete(fleet: ProcessFleet) -> None:
    """Prints how long after the first clause its first sound comes."""
    waits: list[float] = []
    for _ in range(NUM_TIMED):
        with speech_stream(fleet.url) as client:
            client.configure(stream_audio=True)
            client.send("input.text", text=FIRST.rstrip())
            began = time.perf_counter()
            client.send("input.text", text=" ")
            while not client.audio:
                client.next()
            waits.append((time.perf_counter() - began) * 1000)
            client.say("and more.")
            assert client.until("session.done")["total_sentences"] == 2
    print(
        f"sound after the first clause: {sorted(waits)[NUM_TIMED // 2]:.0f} ms (median), "
        f"{max(waits):.0f} ms (worst of {NUM_TIMED})"
    )
