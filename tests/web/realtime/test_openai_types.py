"""OpenAI's own types accept every server event of a conversation, and every field of these types is
present.
"""

import pytest

from fleet.core.errors import EngineError
from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.openai_types import check_event
from tests.web.realtime.socket_client import Event, SocketClient
from tests.web.realtime.speech_samples import QUESTION, question, speech

LONG = Script(num_samples=4 * RATE_HZ, samples_per_chunk=1920, gap_s=0.01)


async def done_with(page: SocketClient, **fields: object) -> Event:
    """Return the final event of the response with the metadata `fields`; the model may begin other
    responses meanwhile.
    """
    while True:
        response: Event = await page.done()
        if fields.items() <= response.items():
            return response


async def test_every_event_matches_openais_types(
    client: SocketClient, gateway: ServedGateway
) -> None:
    """A conversation in which `SocketClient` checks every event it reads against OpenAI's types."""
    detection = {"type": "server_vad", "idle_timeout_ms": 1000}
    await client.update(
        audio={"input": {"transcription": {"model": "whisper-1"}, "turn_detection": detection}}
    )
    await client.append(question())
    await client.until("conversation.item.input_audio_transcription.completed")
    await client.until("input_audio_buffer.timeout_triggered")
    await client.until("response.done")
    await client.detect_turns(None)
    await client.append(speech(QUESTION))
    await client.send("input_audio_buffer.commit")
    item = (await client.until("input_audio_buffer.committed"))["item_id"]
    assert (await client.retrieve(item))["content"][0]["audio"]
    await client.send("conversation.item.delete", item_id=item)
    await client.until("conversation.item.deleted")
    await client.send("input_audio_buffer.clear")
    await client.until("input_audio_buffer.cleared")
    gateway.client.script = Script(end_token=False)
    await client.ask("hello", output_modalities=["text"], metadata={"a": "b"}, max_output_tokens=2)
    assert (await done_with(client, metadata={"a": "b"}))["status"] == "incomplete"
    await interrupted(client, gateway)
    gateway.client.script = Script(fail_at=3, failure=EngineError("it broke"))
    await client.ask("hello", metadata={"fails": "yes"})
    assert (await done_with(client, metadata={"fails": "yes"}))["status"] == "failed"
    await client.append(speech(QUESTION))
    await client.send("input_audio_buffer.commit")
    await client.until("conversation.item.input_audio_transcription.failed")
    await client.send("no.such.event")
    await client.until("error")
    ids = [event["event_id"] for event in client.events]
    assert len(set(ids)) == len(ids)


async def interrupted(page: SocketClient, gateway: ServedGateway) -> None:
    gateway.client.script = LONG
    await page.ask("count")
    await page.until("response.output_audio.delta")
    await page.send("response.cancel")
    done = await page.done()
    assert done["status_details"]["reason"] == "client_cancelled"
    await page.send(
        "conversation.item.truncate",
        item_id=done["output"][0]["id"],
        content_index=0,
        audio_end_ms=0,
    )
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
