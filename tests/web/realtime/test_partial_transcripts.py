"""Transcripts of a turn while the user still speaks, and the final one that completes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.graphs.cascade import ASR
from tests.web.conftest import Loaded, ServedGateway, serving, with_voice
from tests.web.fake_client import Script
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.socket_client import BLOCK_MS, Event, SocketClient
from tests.web.realtime.speech_samples import blocks, silence, speech
from web.realtime.partial_transcripts import AgreedWords

DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
STARTED = "input_audio_buffer.speech_started"
STOPPED = "input_audio_buffer.speech_stopped"
HEARD = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(scope="module")
def served(cascade: Loaded) -> Iterator[ServedGateway]:
    """A gateway whose clock stands still, so that no recognition counts as slow."""
    often = with_voice(cascade, partial_ms=300)
    limits = often.config.limits.model_copy(update={"max_audio_s": 120.0})
    loaded = replace(often, config=often.config.model_copy(update={"limits": limits}))
    with serving(loaded, clock=ManualClock()) as gateway:
        yield gateway


@pytest.fixture
def gateway(served: ServedGateway) -> ServedGateway:
    served.client.reset()
    served.client.script = Script(heard=HEARD, heard_words_per_s=2, num_samples=0)
    return served


async def begin(page: SocketClient, *, create_response: bool, transcribed: bool = True) -> None:
    detection = {
        "type": "server_vad",
        "create_response": create_response,
        "silence_duration_ms": 1000,
    }
    wanted = {"model": "x"} if transcribed else None
    await page.update(audio={"input": {"transcription": wanted, "turn_detection": detection}})


async def speak_until(page: SocketClient, is_enough: Callable[[], bool]) -> None:
    """Speak, block by block, each after the gateway has handled the last, until `is_enough`."""
    for block in blocks(silence(300) + 20 * speech(HEARD), BLOCK_MS):
        if is_enough():
            return
        await page.speak(block)
        await page.events_before_refusal()
    raise AssertionError("the user has spoken for long, and nothing happened")


async def completed(page: SocketClient) -> Event:
    """End the turn, and return its transcript's event."""
    await page.speak(silence(1300))
    while COMPLETED not in page.kinds():
        await page.next()
    return next(event for event in page.events if event["type"] == COMPLETED)


def deltas(page: SocketClient) -> list[str]:
    return [event["delta"] for event in page.events if event["type"] == DELTA]


@pytest.mark.parametrize("create_response", [True, False])
async def test_words_are_sent_while_the_user_speaks(
    page: SocketClient, gateway: ServedGateway, create_response: bool
) -> None:
    await begin(page, create_response=create_response)
    await speak_until(page, lambda: len(deltas(page)) >= 2)
    assert STARTED in page.kinds() and STOPPED not in page.kinds()
    assert HEARD.startswith("".join(deltas(page))), "real words before the turn ends"
    done = await completed(page)
    assert done["transcript"] == "".join(deltas(page)) and HEARD.startswith(done["transcript"])
    (item,) = {event["item_id"] for event in page.events if event["type"] in (STARTED, DELTA)}
    assert done["item_id"] == item


async def test_recognition_of_the_pause_is_the_final_transcript(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """Without a response, the turn's last recognition is of its whole audio, and begins at the
    pause: nothing is recognised after the turn has ended.
    """
    await begin(page, create_response=False)
    await speak_until(page, lambda: len(gateway.client.submitted) >= 2)
    done = await completed(page)
    specs = [spec for spec, _ in gateway.client.submitted]
    assert all(spec.stages == (ASR,) for spec in specs)
    lengths = [clip.num_samples for spec in specs for clip in spec.audio]
    assert lengths == sorted(lengths) and len(set(lengths)) == len(lengths)
    assert round(lengths[-1] / 16_000, 3) == done["usage"]["seconds"]


async def test_corrected_words_are_not_taken_back_and_the_final_transcript_is_right(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await begin(page, create_response=False)
    await speak_until(page, lambda: bool(deltas(page)))
    gateway.client.script = Script(heard="Won too three.", num_samples=0)
    early = "".join(deltas(page))
    assert (await completed(page))["transcript"] == "Won too three."
    assert HEARD.startswith("".join(deltas(page))) and early


async def test_turn_is_not_recognised_for_a_client_that_wants_no_transcript(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await begin(page, create_response=False, transcribed=False)
    await page.speak(silence(300) + speech(HEARD) + silence(1300))
    await page.until(STOPPED)
    await page.events_before_refusal()
    assert not gateway.client.submitted


WORDS = st.lists(st.sampled_from(["a", "bb", "c,"]), max_size=6).map(" ".join)


@given(st.lists(WORDS, max_size=6), WORDS)
def test_agreed_words_only_grow_and_were_recognised_twice(texts: list[str], final: str) -> None:
    agreed, sent = AgreedWords(), ""
    for before, text in zip(["", *texts], texts, strict=False):
        new = agreed.add(text)
        sent += new
        assert sent == agreed.text
        assert not new or (text.startswith(sent) and before.startswith(sent))
    rest = agreed.finish(final)
    assert (sent + rest == final) if final.startswith(sent) else not rest
