"""Who speaks while being spoken to: what stops, what is remembered, and what goes on after a false alarm."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support import wait_until
from tests.web.conftest import Gateway, Loaded, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.realtime.socket_client import Page, opened
from tests.web.realtime.speech_samples import blocks, silence, speech

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
LONG = Script(text=WORDS, num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01, heard="")
"""Meanwhile there are no words in what the user says."""
QUESTION = "what day comes after monday"
COUGH_MS = 300
TRANSCRIPTION = "conversation.item.input_audio_transcription"


async def speak(page: Page, pcm: bytes) -> None:
    for block in blocks(pcm, 100):
        await page.socket.send(block)


def cough() -> bytes:
    """Speech of less than half a second."""
    return speech(QUESTION)[: 2 * RATE_HZ * COUGH_MS // 1000]


async def answering(page: Page, gateway: Gateway, script: Script = LONG) -> dict[str, Any]:
    """The response whose first sound has come."""
    gateway.client.script = script
    await page.ask("count")
    response = (await page.until("response.created"))["response"]
    await page.until_sound(response["id"], FRAME_SAMPLES)
    return response


def prompt(gateway: Gateway) -> str:
    """What the last request was asked."""
    spec, _ = gateway.client.submitted[-1]
    return gateway.client.tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)


async def test_a_false_alarm_ends_nothing(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        first = await answering(page, gateway)
        await speak(page, silence(100) + cough() + silence(700))
        cut = await page.until("response.done")
        assert cut["response"]["status"] == "cancelled"
        second = (await page.until("response.created"))["response"]
        done = await page.until("response.done")
    assert "input_audio_buffer.committed" not in page.kinds(), "a cough is no turn"
    assert done["response"]["id"] == second["id"] != first["id"] and done["response"]["status"] == "completed"
    heard = RATE_HZ * 4 - len(page.sound[second["id"]]) // 2
    assert 0 <= heard <= len(page.sound[first["id"]]) // 2
    whole = sine(4 * RATE_HZ).tobytes()
    assert bytes(page.sound[second["id"]]) == whole[2 * heard :], "it goes on where the listener was, to the sample"
    assert gateway.client.submitted[0][0].sampling == gateway.client.submitted[-1][0].sampling, "the same seed"


async def test_a_false_alarm_ends_nothing_of_an_answer_that_another_gateway_began(loaded: Loaded) -> None:
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        async with opened(first) as page:
            response = await answering(page, first)
            await page.until_sound(response["id"], RATE_HZ)
            wait_until(lambda: page.session in first.client.held, "the session to be written")
            had = len(page.sound[response["id"]]) // 2
            async with opened(second, session=page.session, response=response["id"], samples=had) as again:
                await again.until_sound(response["id"], FRAME_SAMPLES)
                await speak(again, silence(100) + cough() + silence(700))
                assert (await again.until("response.done"))["response"]["status"] == "cancelled"
                rest = (await again.until("response.created"))["response"]
                assert (await again.until("response.done"))["response"]["status"] == "completed"
            await page.socket.wait_closed()
    whole, sound = sine(4 * RATE_HZ).tobytes(), bytes(again.sound[rest["id"]])
    assert sound and whole.endswith(sound), "it goes on where the listener was, to the sample"


async def test_after_a_false_alarm_nothing_is_lost_of_what_was_said(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        await answering(page, gateway)
        await speak(page, silence(100) + cough() + silence(700))
        await page.until("response.done")
        done = await page.until("response.done")
        before = len(gateway.client.submitted)
        await page.ask("and then?")
        await asyncio.to_thread(wait_until, lambda: len(gateway.client.submitted) > before, "the next question")
    assert done["response"]["status"] == "completed"
    assert WORDS in prompt(gateway)


@pytest.mark.parametrize("written_down", [True, False])
async def test_words_are_no_false_alarm_however_short(gateway: Gateway, written_down: bool) -> None:
    """Whether or not the client wants to know which they are."""
    wish = {"model": "x"} if written_down else None
    async with opened(gateway) as page:
        await page.send("session.update", session={"type": "realtime", "audio": {"input": {"transcription": wish}}})
        first = await answering(page, gateway)
        gateway.client.script = Script(heard="stop")
        await speak(page, silence(100) + cough() + silence(700))
        started = await page.until("input_audio_buffer.speech_started")
        committed = await page.until("input_audio_buffer.committed")
        assert committed["item_id"] == started["item_id"]
        answer = await page.until("response.done")
        while written_down and f"{TRANSCRIPTION}.completed" not in page.kinds():
            await page.next()
    assert answer["response"]["id"] != first["id"]
    assert answer["response"]["output"][0]["content"][0]["transcript"] == Script().text, "an answer to it, not the old one's rest"
    told = [event.get("transcript") for event in page.events if event["type"].startswith(TRANSCRIPTION)]
    assert told == ([None, "stop"] if written_down else [])


@asynccontextmanager
async def unjudged(gateway: Gateway, heard: str) -> AsyncIterator[tuple[Page, str, threading.Event]]:
    """An answer is cut by a sound that says `heard`, which nobody knows before the event is set. With the answer's id."""
    gate = threading.Event()
    async with opened(gateway) as page:
        first = await answering(page, gateway)
        gateway.client.script = replace(LONG, heard=heard, submit_gate=gate)
        await speak(page, silence(100) + cough() + silence(700))
        await page.until("input_audio_buffer.speech_stopped")
        yield page, first["id"], gate


def items_of(page: Page, kind: str) -> list[str]:
    return [event["item_id"] for event in page.events if event["type"] == f"input_audio_buffer.{kind}"]


@pytest.mark.parametrize("longer", [True, False])
async def test_who_goes_on_before_a_word_is_understood_has_said_it(gateway: Gateway, longer: bool) -> None:
    async with unjudged(gateway, "no") as (page, first, gate):
        more = speech(QUESTION) if longer else cough()
        await speak(page, more)
        await page.until("input_audio_buffer.speech_started")
        gate.set()
        await page.until("input_audio_buffer.committed")
        await speak(page, silence(700))
        await page.until("input_audio_buffer.committed")
        assert (await page.until("response.done"))["response"]["id"] != first
    assert items_of(page, "committed") == items_of(page, "speech_started")
    assert len(gateway.client.submitted[-1][0].audio) == 2, "both were asked"


async def test_what_is_understood_late_is_said_in_its_order_and_answered_once(gateway: Gateway) -> None:
    async with unjudged(gateway, "no") as (page, _first, gate):
        await speak(page, speech(QUESTION) + silence(700))
        await page.until("input_audio_buffer.speech_stopped")
        gate.set()
        await page.until("response.done")
    committed = [event for event in page.events if event["type"] == "input_audio_buffer.committed"]
    assert [event["item_id"] for event in committed] == items_of(page, "speech_started")
    assert committed[1]["previous_item_id"] == committed[0]["item_id"]
    assert page.kinds().count("response.created") == 2
    assert len(gateway.client.submitted[-1][0].audio) == 2, "both were asked"


@pytest.mark.parametrize("played", [True, False])
async def test_two_false_alarms_end_no_more_than_one(gateway: Gateway, played: bool) -> None:
    """`played`: the listener was silent again when the second came."""
    async with unjudged(gateway, "") as (page, first, gate):
        if played:
            await page.send("fleet.played", response_id=first, samples=4 * RATE_HZ)
        await speak(page, cough())
        await page.until("input_audio_buffer.speech_started")
        gate.set()
        await speak(page, silence(700))
        rest = (await page.until("response.created"))["response"]
        done = (await page.until("response.done"))["response"]
    assert done["id"] == rest["id"] and done["status"] == "completed"
    assert "input_audio_buffer.committed" not in page.kinds()
    assert sine(4 * RATE_HZ).tobytes().endswith(bytes(page.sound[rest["id"]]))


async def test_a_model_that_cannot_hear_takes_what_is_short_for_a_false_alarm(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        async with opened(gateway) as page:
            gateway.client.script = replace(LONG, stall_at=5)
            await page.ask("count")
            await page.until("response.output_text.delta")
            await speak(page, silence(100) + cough() + silence(700))
            assert (await page.until("response.done"))["response"]["status"] == "cancelled"
            gateway.client.script = LONG
            assert (await page.until("response.done"))["response"]["status"] == "completed"
    assert "input_audio_buffer.committed" not in page.kinds()


async def retrieved(page: Page, item: str) -> str:
    await page.send("conversation.item.retrieve", item_id=item)
    return (await page.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]


async def with_a_second_to_play(page: Page, response: str) -> None:
    """The listener is a second into it and has been sent another."""
    await page.send("fleet.played", response_id=response, samples=RATE_HZ)
    await page.until_sound(response, 2 * RATE_HZ)


async def cut_at_once(page: Page, response: str, item: str) -> None:
    """The client has played nothing of it, as it says, and the server believes that there is a second still to play."""
    await page.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=0)
    await page.send("fleet.played", response_id=response, samples=RATE_HZ)


async def test_what_the_client_cancelled_neither_grows_nor_goes_on(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        response = await answering(page, gateway)
        await with_a_second_to_play(page, response["id"])
        await page.send("response.cancel")
        item = (await page.until("response.done"))["response"]["output"][0]["id"]
        await cut_at_once(page, response["id"], item)
        await speak(page, silence(100) + cough())
        await page.until("input_audio_buffer.speech_started")
        assert await retrieved(page, item) == "", "what was cut does not come back"
        await speak(page, silence(700))
        await page.until("input_audio_buffer.committed")
        again = (await page.until("response.created"))["response"]
        await page.until_sound(again["id"], FRAME_SAMPLES)
    whole = sine(4 * RATE_HZ).tobytes()
    assert whole.startswith(bytes(page.sound[again["id"]])), "another answer, from its beginning"


async def test_a_second_false_alarm_takes_the_answer_no_further(gateway: Gateway) -> None:
    gate = threading.Event()
    async with opened(gateway) as page:
        response = await answering(page, gateway)
        await with_a_second_to_play(page, response["id"])
        gateway.client.script = replace(LONG, submit_gate=gate)
        await speak(page, silence(100) + cough() + silence(700))
        item = (await page.until("response.done"))["response"]["output"][0]["id"]
        await page.until("input_audio_buffer.speech_stopped")
        await cut_at_once(page, response["id"], item)
        await speak(page, silence(100) + cough() + silence(700))
        await page.until("input_audio_buffer.speech_stopped")
        gate.set()
        rest = (await page.until("response.created"))["response"]
        assert (await page.until("response.done"))["response"]["id"] == rest["id"]
    assert bytes(page.sound[rest["id"]]) == sine(4 * RATE_HZ).tobytes(), "it goes on where the client cut it"


async def test_only_what_was_heard_is_in_the_next_prompt(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        response = await answering(page, gateway)
        await page.until_sound(response["id"], RATE_HZ)
        await page.send("fleet.played", response_id=response["id"], samples=RATE_HZ // 2)
        await speak(page, silence(50) + speech(QUESTION))
        done = await page.until("response.done")
        item = done["response"]["output"][0]
        await page.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=800)
        await page.until("conversation.item.truncated")
        await page.send("conversation.item.retrieve", item_id=item["id"])
        kept = (await page.until("conversation.item.retrieved"))["item"]
        gateway.client.script = Script()
        await speak(page, silence(800))
        await page.until("response.done")
    words = kept["content"][0]["transcript"]
    assert WORDS.startswith(words) and kept["status"] == "incomplete"
    # 0.8 of 4 seconds are three of the fifteen words; the whole is not known when it is cut, so rather less
    assert len(words.split()) <= 3
    assert f"{words}<" in prompt(gateway).replace("\n", "") if words else WORDS[:3] not in prompt(gateway)


async def test_the_user_may_be_forbidden_to_interrupt(gateway: Gateway) -> None:
    detection = {"type": "server_vad", "interrupt_response": False}
    async with opened(gateway) as page:
        await page.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}})
        first = await answering(page, gateway)
        await speak(page, speech(QUESTION) + silence(800))
        await page.until("input_audio_buffer.committed")
        done = await page.until("response.done")
        assert done["response"]["id"] == first["id"] and done["response"]["status"] == "completed"
        second = await page.until("response.created")
        assert second["response"]["id"] != first["id"], "what was said meanwhile is answered then"


async def test_a_response_outside_the_conversation_takes_no_answer_away(gateway: Gateway) -> None:
    """It ends while one answer is told, and another is owed after that."""
    detection = {"type": "server_vad", "interrupt_response": False}
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "classify this"}]}
    aside = {"conversation": "none", "input": [message], "output_modalities": ["text"]}
    async with opened(gateway) as page:
        await page.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}})
        first = await answering(page, gateway, replace(LONG, stall_at=4))
        await speak(page, speech(QUESTION) + silence(800))
        await page.until("input_audio_buffer.committed")
        gateway.client.script = Script()
        await page.send("response.create", response=aside)
        assert (await page.until("response.done"))["response"]["conversation_id"] is None
        await page.send("response.cancel")
        assert (await page.until("response.done"))["response"]["id"] == first["id"]
        answer = (await page.until("response.done"))["response"]
    assert answer["conversation_id"] is not None and answer["status"] == "completed"
    assert len(gateway.client.submitted[-1][0].audio) == 1, "what was said meanwhile is answered"


async def test_push_to_talk(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        await page.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        await page.send("input_audio_buffer.commit")
        assert (await page.until("error"))["error"]["code"] == "input_audio_buffer_commit_empty"
        await speak(page, speech(QUESTION) + silence(900) + speech(QUESTION))
        await page.send("input_audio_buffer.commit")
        await page.until("conversation.item.done")
        await page.send("response.create")
        await page.until("response.done")
        assert "input_audio_buffer.speech_started" not in page.kinds()
        assert gateway.client.submitted[0][0].audio[0].num_samples > 4 * 16_000
        for _ in range(3):
            await speak(page, silence(2_000))
        assert (await page.until("error"))["error"]["code"] == "input_too_large"
        await page.send("input_audio_buffer.clear")
        await page.until("input_audio_buffer.cleared")


async def test_a_response_outside_the_conversation_leaves_no_trace_in_it(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "classify this"}]}
        await page.send("response.create", response={"conversation": "none", "input": [message], "output_modalities": ["text"],
                                                     "metadata": {"topic": "1"}})  # fmt: skip
        done = (await page.until("response.done"))["response"]
        assert done["conversation_id"] is None and done["metadata"] == {"topic": "1"}
        assert done["output"][0]["content"][0]["text"] == Script().text
        assert "conversation.item.added" not in page.kinds() and not gateway.client.submitted[0][0].session
        await page.send("response.create")
        error = await page.until("error")
    assert error["error"]["param"] == "response.input", "the conversation is empty"


async def test_long_silence_is_broken(gateway: Gateway) -> None:
    detection = {"type": "server_vad", "idle_timeout_ms": 1000}
    async with opened(gateway) as page:
        await page.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}})
        await page.ask("hello")
        await page.until("response.done")
        await speak(page, silence(300))
        async with asyncio.timeout(15):
            await page.until("input_audio_buffer.timeout_triggered")
            await page.until("response.done")
