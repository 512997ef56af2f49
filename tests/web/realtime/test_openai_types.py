"""OpenAI's own types accept every event of a conversation and have all of its fields."""

import base64

import pytest

from fleet.core.errors import EngineError
from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.openai_types import check_event
from tests.web.realtime.socket_client import Event, SocketClient, opened
from tests.web.realtime.speech_samples import blocks, silence, speech

QUESTION = "what day comes after monday"
LONG = Script(num_samples=4 * RATE_HZ, samples_per_chunk=1920, gap_s=0.01)


async def append(page: SocketClient, pcm: bytes) -> None:
    for block in blocks(pcm, 100):
        await page.send("input_audio_buffer.append", audio=base64.b64encode(block).decode())


async def listens(page: SocketClient, **fields: object) -> None:
    await page.send("session.update", session={"type": "realtime", "audio": {"input": fields}})
    await page.until("session.updated")


async def done_with(page: SocketClient, **fields: object) -> Event:
    """Return the end of the response with this metadata; the model may begin others meanwhile."""
    while True:
        response: Event = (await page.until("response.done"))["response"]
        if fields.items() <= response.items():
            return response


async def test_every_event_matches_openais_types(gateway: ServedGateway) -> None:
    """`SocketClient` checks each event that it reads."""
    async with opened(gateway, "/v1/realtime") as page:
        await listens(page, transcription={"model": "x"}, turn_detection={"type": "server_vad", "idle_timeout_ms": 1000})
        await append(page, silence(300) + speech(QUESTION) + silence(800))
        await page.until("conversation.item.input_audio_transcription.completed")
        await page.until("input_audio_buffer.timeout_triggered")
        await page.until("response.done")
        await listens(page, turn_detection=None)
        await append(page, speech(QUESTION))
        await page.send("input_audio_buffer.commit")
        item = (await page.until("input_audio_buffer.committed"))["item_id"]
        await page.send("conversation.item.retrieve", item_id=item)
        assert (await page.until("conversation.item.retrieved"))["item"]["content"][0]["audio"]
        await page.send("conversation.item.delete", item_id=item)
        await page.until("conversation.item.deleted")
        await page.send("input_audio_buffer.clear")
        await page.until("input_audio_buffer.cleared")
        gateway.client.script = Script(end_token=False)
        await page.ask("hello", output_modalities=["text"], metadata={"a": "b"}, max_output_tokens=2)
        assert (await done_with(page, metadata={"a": "b"}))["status"] == "incomplete"
        await interrupted(page, gateway)
        gateway.client.script = Script(fail_at=3, failure=EngineError("it broke"))
        await page.ask("hello", metadata={"fails": "yes"})
        assert (await done_with(page, metadata={"fails": "yes"}))["status"] == "failed"
        await append(page, speech(QUESTION))
        await page.send("input_audio_buffer.commit")
        await page.until("conversation.item.input_audio_transcription.failed")
        await page.send("no.such.event")
        await page.until("error")
    ids = [event["event_id"] for event in page.events]
    assert len(set(ids)) == len(ids)


async def interrupted(page: SocketClient, gateway: ServedGateway) -> None:
    gateway.client.script = LONG
    await page.ask("count")
    await page.until("response.output_audio.delta")
    await page.send("response.cancel")
    done = (await page.until("response.done"))["response"]
    assert done["status_details"]["reason"] == "client_cancelled"
    await page.send("conversation.item.truncate", item_id=done["output"][0]["id"], content_index=0, audio_end_ms=0)
    await page.until("conversation.item.truncated")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.done", "event_id": "e", "response": {"status": "finished"}},
        {"type": "input_audio_buffer.cleared", "event_id": "e", "more": 1},
        {"type": "input_audio_buffer.cleared"},
        {"type": "response.audio.delta", "event_id": "e"},
    ],
)
def test_event_that_differs_from_openais_types_is_detected(event: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        check_event(event)
