"""Barge-in: the response is cancelled and its history truncated, and after a false alarm it is
resumed.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.socket_client import SocketClient, message, opened, transcript
from tests.web.realtime.speech_samples import QUESTION, silence, speech
from web.realtime import session_registry

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
LONG = Script(
    text=WORDS, num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01, heard=""
)
"""Script of a long answer, in which the user's audio transcribes to no words."""
AHEAD = 12 * FRAME_SAMPLES
"""Number of samples sent ahead of playback: whole frames within a second."""
WHOLE = sine(4 * RATE_HZ).tobytes()
COUGH_MS = 300
TRANSCRIPTION = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def shared_gateway(loaded: Loaded, clock: ManualClock) -> Iterator[ServedGateway]:
    """A gateway that sends audio up to a second ahead of playback, which stands still until the
    test advances the clock.
    """
    with serving(loaded, clock=clock) as gateway:
        yield gateway


async def play_to_end(page: SocketClient, clock: ManualClock) -> dict[str, Any]:
    """Play all audio of a response, and return its last event."""
    clock.advance(1)
    while True:
        event = await page.next()
        if event is None:
            clock.advance(1)
        elif event["type"] == "response.done":
            return event


def cough() -> bytes:
    """Return speech of less than half a second."""
    return speech(QUESTION)[: 2 * RATE_HZ * COUGH_MS // 1000]


async def answering(
    page: SocketClient, gateway: ServedGateway, script: Script = LONG
) -> dict[str, Any]:
    """Begin a response, and return it once its first audio has arrived."""
    gateway.client.script = script
    await page.ask("count")
    response = (await page.until("response.created"))["response"]
    await page.until_audio(response["id"], FRAME_SAMPLES)
    return response


def prompt(gateway: ServedGateway) -> str:
    """Return the prompt of the gateway's last request."""
    spec, _ = gateway.client.submitted[-1]
    return gateway.client.tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)


async def test_false_alarm_resumes_the_response_at_the_played_sample(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    first = await answering(page, gateway)
    await page.until_audio(first["id"], AHEAD)
    clock.advance(0.5)
    await page.speak(silence(100) + cough() + silence(700))
    assert (await page.done())["status"] == "cancelled"
    second = (await page.until("response.created"))["response"]
    done = await play_to_end(page, clock)
    assert "input_audio_buffer.committed" not in page.kinds(), "a cough is no turn"
    assert (
        done["response"]["id"] == second["id"] != first["id"]
        and done["response"]["status"] == "completed"
    )
    assert bytes(page.audio[second["id"]]) == WHOLE[RATE_HZ:], "half a second was played"
    assert gateway.client.submitted[0][0].sampling == gateway.client.submitted[-1][0].sampling, (
        "the same seed"
    )


async def test_false_alarm_resumes_a_response_that_another_gateway_began(
    loaded: Loaded, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_registry, "SETTLE_S", 0.0)
    with (
        serving(loaded, clock=clock) as first,
        serving(loaded, client=first.client, clock=clock) as second,
    ):
        async with opened(first) as page:
            response = await answering(page, first)
            await page.until_audio(response["id"], AHEAD)
            wait_until(
                lambda: "state" in first.client.voice.held[page.session].fields,
                "the session to be written",
            )
            had = len(page.audio[response["id"]]) // 2
            async with opened(
                second, session=page.session, response=response["id"], samples=had
            ) as again:
                await again.until_audio(response["id"], FRAME_SAMPLES)
                await again.speak(silence(100) + cough() + silence(700))
                assert (await again.done())["status"] == "cancelled"
                rest = (await again.until("response.created"))["response"]
                assert (await play_to_end(again, clock))["response"]["status"] == "completed"
            await page.socket.wait_closed()
    sound = bytes(again.audio[rest["id"]])
    assert sound and WHOLE.endswith(sound)


async def test_prompt_after_a_false_alarm_holds_all_words(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    await answering(page, gateway)
    await page.speak(silence(100) + cough() + silence(700))
    await page.until("response.created")
    done = await play_to_end(page, clock)
    before = len(gateway.client.submitted)
    await page.ask("and then?")
    await asyncio.to_thread(
        wait_until, lambda: len(gateway.client.submitted) > before, "the next question"
    )
    assert done["response"]["status"] == "completed"
    assert WORDS in prompt(gateway)


@pytest.mark.parametrize("is_transcribed", [True, False])
async def test_short_interruption_with_words_is_a_turn(
    page: SocketClient, gateway: ServedGateway, is_transcribed: bool
) -> None:
    transcription = {"model": "x"} if is_transcribed else None
    await page.update(audio={"input": {"transcription": transcription}})
    first = await answering(page, gateway)
    gateway.client.script = Script(heard="stop")
    await page.speak(silence(100) + cough() + silence(700))
    started = await page.until("input_audio_buffer.speech_started")
    committed = await page.until("input_audio_buffer.committed")
    assert committed["item_id"] == started["item_id"]
    answer = await page.until("response.done")
    while is_transcribed and f"{TRANSCRIPTION}.completed" not in page.kinds():
        await page.next()
    assert answer["response"]["id"] != first["id"]
    assert answer["response"]["output"][0]["content"][0]["transcript"] == Script().text, (
        "not the rest of the old response"
    )
    transcripts = [
        event.get("transcript") for event in page.events if event["type"].startswith(TRANSCRIPTION)
    ]
    assert transcripts == ([None, "stop"] if is_transcribed else [])


@asynccontextmanager
async def unverified(
    gateway: ServedGateway, transcript: str
) -> AsyncIterator[tuple[SocketClient, str, threading.Event]]:
    """Interrupt a response by audio with this transcript, which becomes available once the yielded
    event is set.
    """
    gate = threading.Event()
    async with opened(gateway) as page:
        first = await answering(page, gateway)
        gateway.client.script = replace(LONG, heard=transcript, submit_gate=gate)
        await page.speak(silence(100) + cough() + silence(700))
        await page.until("input_audio_buffer.speech_stopped")
        yield page, first["id"], gate


def items_of(page: SocketClient, kind: str) -> list[str]:
    return [
        event["item_id"] for event in page.events if event["type"] == f"input_audio_buffer.{kind}"
    ]


@pytest.mark.parametrize("longer", [True, False])
async def test_speech_during_verification_is_answered_with_it(
    gateway: ServedGateway, clock: ManualClock, longer: bool
) -> None:
    async with unverified(gateway, "no") as (page, first, gate):
        more = speech(QUESTION) if longer else cough()
        await page.speak(more)
        await page.until("input_audio_buffer.speech_started")
        gate.set()
        await page.until("input_audio_buffer.committed")
        await page.speak(silence(700))
        await page.until("input_audio_buffer.committed")
        await page.until("response.created")
        assert (await play_to_end(page, clock))["response"]["id"] != first
    assert items_of(page, "committed") == items_of(page, "speech_started")
    assert len(gateway.client.submitted[-1][0].audio) == 2, "the prompt holds both turns"


async def test_turns_verified_late_stay_in_order_and_are_answered_once(
    gateway: ServedGateway, clock: ManualClock
) -> None:
    async with unverified(gateway, "no") as (page, _first, gate):
        await page.speak(speech(QUESTION) + silence(700))
        await page.until("input_audio_buffer.speech_stopped")
        gate.set()
        await page.until("response.created")
        await play_to_end(page, clock)
    committed = [event for event in page.events if event["type"] == "input_audio_buffer.committed"]
    assert [event["item_id"] for event in committed] == items_of(page, "speech_started")
    assert committed[1]["previous_item_id"] == committed[0]["item_id"]
    assert page.kinds().count("response.created") == 2
    assert len(gateway.client.submitted[-1][0].audio) == 2, "the prompt holds both turns"


@pytest.mark.parametrize("played", [True, False])
async def test_second_false_alarm_resumes_the_same_response(
    gateway: ServedGateway, clock: ManualClock, played: bool
) -> None:
    """A second false alarm resumes the same response. `played`: whether the client had played
    everything at the second alarm.
    """
    async with unverified(gateway, "") as (page, first, gate):
        if played:
            await page.send("fleet.played", response_id=first, samples=4 * RATE_HZ)
        await page.speak(cough())
        await page.until("input_audio_buffer.speech_started")
        gate.set()
        await page.speak(silence(700))
        rest = (await page.until("response.created"))["response"]
        done = (await play_to_end(page, clock))["response"]
    assert done["id"] == rest["id"] and done["status"] == "completed"
    assert "input_audio_buffer.committed" not in page.kinds()
    assert WHOLE.endswith(bytes(page.audio[rest["id"]]))


async def play_a_second(page: SocketClient, response: str) -> None:
    """Report that the client has played a second, and receive the next second of audio."""
    await page.until_audio(response, AHEAD)
    await page.send("fleet.played", response_id=response, samples=AHEAD)
    await page.until_audio(response, 2 * AHEAD)


async def truncate_to_nothing(page: SocketClient, response: str, item: str) -> None:
    """Truncate the whole response while the server still expects a second to be played."""
    await page.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=0)
    await page.send("fleet.played", response_id=response, samples=RATE_HZ)


async def test_cancelled_response_is_not_resumed_after_a_false_alarm(
    page: SocketClient, gateway: ServedGateway
) -> None:
    response = await answering(page, gateway)
    await play_a_second(page, response["id"])
    await page.send("response.cancel")
    item = (await page.done())["output"][0]["id"]
    await truncate_to_nothing(page, response["id"], item)
    await page.speak(silence(100) + cough())
    await page.until("input_audio_buffer.speech_started")
    assert transcript(await page.retrieve(item)) == "", "truncated words stay removed"
    await page.speak(silence(700))
    await page.until("input_audio_buffer.committed")
    again = (await page.until("response.created"))["response"]
    await page.until_audio(again["id"], FRAME_SAMPLES)
    assert WHOLE.startswith(bytes(page.audio[again["id"]])), "another response, from its beginning"


async def test_second_false_alarm_resumes_where_the_client_truncated(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    gate = threading.Event()
    response = await answering(page, gateway)
    await play_a_second(page, response["id"])
    gateway.client.script = replace(LONG, submit_gate=gate)
    await page.speak(silence(100) + cough() + silence(700))
    item = (await page.done())["output"][0]["id"]
    await page.until("input_audio_buffer.speech_stopped")
    await truncate_to_nothing(page, response["id"], item)
    await page.speak(silence(100) + cough() + silence(700))
    await page.until("input_audio_buffer.speech_stopped")
    gate.set()
    rest = (await page.until("response.created"))["response"]
    assert (await play_to_end(page, clock))["response"]["id"] == rest["id"]
    assert bytes(page.audio[rest["id"]]) == WHOLE


async def test_next_prompt_holds_only_the_played_words(
    page: SocketClient, gateway: ServedGateway
) -> None:
    response = await answering(page, gateway)
    await page.until_audio(response["id"], AHEAD)
    await page.send("fleet.played", response_id=response["id"], samples=RATE_HZ // 2)
    await page.speak(silence(50) + speech(QUESTION))
    item = (await page.done())["output"][0]
    await page.send(
        "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=800
    )
    await page.until("conversation.item.truncated")
    kept = await page.retrieve(item["id"])
    gateway.client.script = Script()
    await page.speak(silence(800))
    await page.until("response.done")
    words = kept["content"][0]["transcript"]
    assert WORDS.startswith(words) and kept["status"] == "incomplete"
    # 0.8 of 4 seconds are three of the fifteen words; the whole is not known when it is cut, so
    # rather less
    assert len(words.split()) <= 3
    assert (
        f"{words}<" in prompt(gateway).replace("\n", "")
        if words
        else WORDS[:3] not in prompt(gateway)
    )


async def test_turn_that_may_not_interrupt_is_answered_next(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    await page.detect_turns({"type": "server_vad", "interrupt_response": False})
    first = await answering(page, gateway)
    await page.speak(speech(QUESTION) + silence(800))
    await page.until("input_audio_buffer.committed")
    done = await play_to_end(page, clock)
    assert done["response"]["id"] == first["id"] and done["response"]["status"] == "completed"
    second = await page.until("response.created")
    assert second["response"]["id"] != first["id"], "the turn is answered afterwards"


async def test_out_of_band_response_leaves_the_deferred_one_pending(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """The user's turn ends while a response is active, and its response is deferred; an out-of-band
    response in between leaves the deferred one pending.
    """
    aside = {
        "conversation": "none",
        "input": [message("classify this")],
        "output_modalities": ["text"],
    }
    await page.detect_turns({"type": "server_vad", "interrupt_response": False})
    first = await answering(page, gateway, replace(LONG, stall_at=4))
    await page.speak(speech(QUESTION) + silence(800))
    await page.until("input_audio_buffer.committed")
    gateway.client.script = Script()
    await page.send("response.create", response=aside)
    assert (await page.done())["conversation_id"] is None
    await page.send("response.cancel")
    assert (await page.done())["id"] == first["id"]
    answer = await page.done()
    assert answer["conversation_id"] is not None and answer["status"] == "completed"
    assert len(gateway.client.submitted[-1][0].audio) == 1, "the turn is answered"


async def test_push_to_talk_commits_only_when_asked(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.detect_turns(None)
    await page.send("input_audio_buffer.commit")
    assert (await page.error())["code"] == "input_audio_buffer_commit_empty"
    await page.speak(speech(QUESTION) + silence(900) + speech(QUESTION))
    await page.send("input_audio_buffer.commit")
    await page.until("conversation.item.done")
    await page.complete()
    assert "input_audio_buffer.speech_started" not in page.kinds()
    assert gateway.client.submitted[0][0].audio[0].num_samples > 4 * 16_000
    for _ in range(3):
        await page.speak(silence(2_000))
    assert (await page.error())["code"] == "input_too_large"
    await page.send("input_audio_buffer.clear")
    await page.until("input_audio_buffer.cleared")


async def test_out_of_band_response_adds_no_item(
    page: SocketClient, gateway: ServedGateway
) -> None:
    aside = {
        "conversation": "none",
        "input": [message("classify this")],
        "output_modalities": ["text"],
    }
    done = await page.complete(**aside, metadata={"topic": "1"})
    assert done["conversation_id"] is None and done["metadata"] == {"topic": "1"}
    assert done["output"][0]["content"][0]["text"] == Script().text
    assert (
        "conversation.item.added" not in page.kinds() and not gateway.client.submitted[0][0].session
    )
    await page.send("response.create")
    assert (await page.error())["param"] == "response.input", "the conversation is empty"


async def test_idle_timeout_begins_a_response(page: SocketClient, clock: ManualClock) -> None:
    await page.detect_turns({"type": "server_vad", "idle_timeout_ms": 1000})
    await page.complete("hello")
    clock.advance(1)
    await page.until("fleet.state", state="listening")
    await page.speak(silence(300))
    await page.update()
    clock.advance(1)
    await page.until("input_audio_buffer.timeout_triggered")
    await page.until("response.done")
