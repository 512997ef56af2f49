"""OpenAI's own client, unmodified, over `WS /v1/realtime`: a text turn, an audio turn, cancel,
truncate.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent

from tests.support import wait_until
from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script, sine
from tests.web.realtime.speech_samples import QUESTION, blocks, silence, speech

pytestmark = pytest.mark.one_in(2, "OpenAI's client of voice sockets")


@pytest.fixture
def gateway(any_gateway: ServedGateway) -> ServedGateway:
    return any_gateway


@asynccontextmanager
async def connected(
    gateway: ServedGateway, **options: object
) -> AsyncIterator[AsyncRealtimeConnection]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        async with client.realtime.connect(
            model="omni",
            **options,  # pyright: ignore[reportArgumentType]
        ) as connection:
            assert (await connection.recv()).type == "session.created"
            yield connection


async def until(connection: AsyncRealtimeConnection, kind: str) -> list[RealtimeServerEvent]:
    """Return the received events up to and including the first event of type `kind`."""
    events: list[RealtimeServerEvent] = []
    while not events or events[-1].type != kind:
        events.append(await connection.recv())
    return events


def kinds(events: list[RealtimeServerEvent]) -> list[str]:
    """Return the types of the events, where repeated deltas count once."""
    found: list[str] = []
    for event in events:
        if not found or found[-1] != event.type:
            found.append(event.type)
    return found


async def say(connection: AsyncRealtimeConnection, text: str) -> None:
    await connection.conversation.item.create(
        item={
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
    )


async def test_text_turn_is_answered_in_speech(gateway: ServedGateway) -> None:
    async with connected(gateway) as connection:
        await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        await say(connection, "hello")
        await connection.response.create(response={"metadata": {"client": "7"}})
        events = await until(connection, "response.done")
    created = next(event for event in events if event.type == "response.created")
    assert created.response.metadata == {"client": "7"}
    done = events[-1]
    assert done.type == "response.done" and done.response.status == "completed"
    sound = b"".join(
        base64.b64decode(event.delta)
        for event in events
        if event.type == "response.output_audio.delta"
    )
    assert sound == sine(Script().num_samples).tobytes()
    transcript = "".join(
        event.delta for event in events if event.type == "response.output_audio_transcript.delta"
    )
    assert transcript == Script().text
    spec, _ = gateway.client.submitted[0]
    assert spec.outputs == ("text", "audio") and spec.session


async def speak(connection: AsyncRealtimeConnection, pcm: bytes) -> None:
    for block in blocks(pcm, 100):
        await connection.input_audio_buffer.append(audio=base64.b64encode(block).decode())


async def test_spoken_turn_is_answered(gateway: ServedGateway) -> None:
    async with connected(gateway) as connection:
        await speak(connection, silence(500) + speech(QUESTION) + silence(800))
        events = await until(connection, "response.done")
    assert kinds(events)[:9] == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
    ]
    started, stopped = events[0], events[1]
    assert (
        started.type == "input_audio_buffer.speech_started" and 100 <= started.audio_start_ms <= 500
    )
    assert (
        stopped.type == "input_audio_buffer.speech_stopped"
        and stopped.audio_end_ms > started.audio_start_ms + 800
    )
    assert len(gateway.client.submitted) == 1, "the speculative response is used"
    spec, blob = gateway.client.submitted[0]
    assert blob is not None and len(spec.audio) == 1
    heard_ms = spec.audio[0].num_samples / 16
    assert abs(heard_ms - (stopped.audio_end_ms - started.audio_start_ms)) <= 1


async def test_continued_speech_discards_the_speculative_response(gateway: ServedGateway) -> None:
    async with connected(gateway) as connection:
        spoken = speech(QUESTION)
        gateway.client.script = Script(stall_at=3)
        await speak(connection, silence(300) + spoken + silence(450))
        await asyncio.to_thread(
            wait_until, lambda: gateway.client.submitted, "an answer to be begun"
        )
        gateway.client.script = Script()
        await speak(connection, spoken + silence(800))
        events = await until(connection, "response.done")
    assert [event.type for event in events].count("response.created") == 1
    assert len(gateway.client.submitted) == 2
    first, second = (gateway.client.streams[spec.id] for spec, _ in gateway.client.submitted)
    assert first.aborted is not None and second.aborted is None


async def test_interrupted_response_keeps_only_played_words(gateway: ServedGateway) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve"
    gateway.client.script = Script(
        text=words, num_samples=10 * RATE_HZ, samples_per_chunk=RATE_HZ, stall_at=-1
    )
    async with connected(gateway) as connection:
        await say(connection, "count")
        await connection.response.create()
        events = await until(connection, "response.output_audio.delta")
        gateway.client.script = Script()
        await speak(connection, silence(100) + speech(QUESTION))
        events = await until(connection, "response.done")
        assert kinds([event for event in events if not event.type.endswith("delta")]) == [
            "input_audio_buffer.speech_started",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        done = events[-1]
        assert done.type == "response.done" and done.response.status == "cancelled"
        assert (
            done.response.status_details is not None
            and done.response.status_details.reason == "turn_detected"
        )
        assert done.response.output
        item = done.response.output[0]
        assert item.id is not None
        await connection.conversation.item.truncate(
            item_id=item.id, content_index=0, audio_end_ms=0
        )
        assert (await until(connection, "conversation.item.truncated"))[-1]
        await speak(connection, silence(700))
        await until(connection, "response.done")
    (fake,) = [gateway.client.streams[spec.id] for spec, _ in gateway.client.submitted[:1]]
    assert fake.aborted is not None


async def test_cancel_without_an_active_response_is_refused(gateway: ServedGateway) -> None:
    gateway.client.script = Script(num_samples=10 * RATE_HZ, samples_per_chunk=RATE_HZ)
    async with connected(gateway) as connection:
        await connection.response.cancel()
        error = (await until(connection, "error"))[-1]
        assert error.type == "error" and error.error.code == "response_cancel_not_active"
        await say(connection, "count")
        await connection.response.create()
        await until(connection, "response.output_audio.delta")
        await connection.response.create()
        error = (await until(connection, "error"))[-1]
        assert (
            error.type == "error" and error.error.code == "conversation_already_has_active_response"
        )
        await connection.response.cancel()
        done = (await until(connection, "response.done"))[-1]
        assert done.type == "response.done" and done.response.status_details is not None
        assert done.response.status_details.reason == "client_cancelled"
