"""Size limits of client events: events that carry audio may be long, and are parsed in a thread;
all others must be short.
"""

import base64

import pytest

from tests.web.realtime.socket_client import SocketClient
from web.realtime.protocol.client_events import MAX_PLAIN_BYTES

PCM = b"\x00\x01" * 108_000
"""PCM16 recording of 4.5 seconds."""
AUDIO = base64.b64encode(PCM).decode()
SPOKEN = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": AUDIO}]}


assert len(AUDIO) > MAX_PLAIN_BYTES


async def audio_of(page: SocketClient, item_id: str) -> bytes:
    return base64.b64decode((await page.retrieve(item_id))["content"][0]["audio"])


async def test_long_recording_becomes_an_item(client: SocketClient) -> None:
    await client.send("conversation.item.create", item=SPOKEN)
    item_id = (await client.until("conversation.item.done"))["item"]["id"]
    assert abs(len(await audio_of(client, item_id)) - len(PCM)) <= 4


async def test_long_recording_is_appended_completely(client: SocketClient) -> None:
    await client.detect_turns(None)
    await client.send("input_audio_buffer.append", audio=AUDIO)
    await client.send("input_audio_buffer.commit")
    item_id = (await client.until("input_audio_buffer.committed"))["item_id"]
    assert abs(len(await audio_of(client, item_id)) - len(PCM)) <= 400


async def test_long_recording_in_a_response_is_joined_to_referenced_items(
    client: SocketClient,
) -> None:
    await client.send(
        "conversation.item.create",
        item={**SPOKEN, "content": [{"type": "input_text", "text": "hello"}]},
    )
    item_id = (await client.until("conversation.item.done"))["item"]["id"]
    given = [{"type": "item_reference", "id": item_id}, SPOKEN]
    await client.send("response.create", response={"conversation": "none", "input": given})
    await client.completed()
    await client.send(
        "response.create",
        response={"input": [{"type": "item_reference", "id": "no-such-item"}, SPOKEN]},
    )
    assert (await client.error())["param"] == "response.input[0].id"


@pytest.mark.parametrize("kind", ["conversation.item.create", "response.create"])
async def test_mistake_in_a_long_event_is_named_with_its_field_and_event(
    client: SocketClient, kind: str
) -> None:
    wrong = {**SPOKEN, "role": "system"}
    event = (
        {"item": wrong} if kind == "conversation.item.create" else {"response": {"input": [wrong]}}
    )
    error = await client.refusal_of(kind, **event)
    assert "only a user's content can be audio" in error["message"]
    await client.complete("hello")


async def test_long_event_without_audio_is_refused_by_its_bound(client: SocketClient) -> None:
    error = await client.refusal_of(
        "session.update", session={"instructions": "x" * MAX_PLAIN_BYTES}
    )
    assert (
        error["code"] == "input_too_large"
        and error["message"].startswith("session.update: ")
        and str(MAX_PLAIN_BYTES) in error["message"]
    )
    await client.complete("hello")


async def test_session_with_many_tools_is_accepted(client: SocketClient) -> None:
    parameters = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "description": "x" * 60} for n in range(12)},
    }
    tools = [
        {"type": "function", "name": f"tool{n}", "description": "y" * 200, "parameters": parameters}
        for n in range(128)
    ]
    errors, now = await client.update(tools=tools, instructions="be brief")
    assert not errors and now["instructions"] == "be brief"
