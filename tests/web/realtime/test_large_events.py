"""Events that carry audio may be long, and are read in a thread; all others are short."""

import base64
import json
from typing import Any

import pytest

from tests.web.conftest import ServedGateway
from tests.web.realtime.socket_client import SocketClient, opened
from web.realtime.protocol.client_events import MAX_PLAIN_BYTES

PCM = b"\x00\x01" * 108_000
"""A recording of 4.5 seconds."""
AUDIO = base64.b64encode(PCM).decode()
SPOKEN = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": AUDIO}]}


assert len(AUDIO) > MAX_PLAIN_BYTES


async def listens_by_hand(page: SocketClient) -> None:
    await page.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    await page.until("session.updated")


async def audio_of(page: SocketClient, item_id: str) -> bytes:
    await page.send("conversation.item.retrieve", item_id=item_id)
    item: dict[str, Any] = (await page.until("conversation.item.retrieved"))["item"]
    return base64.b64decode(item["content"][0]["audio"])


async def test_long_recording_becomes_an_item(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        await page.send("conversation.item.create", item=SPOKEN)
        item_id = (await page.until("conversation.item.done"))["item"]["id"]
        assert abs(len(await audio_of(page, item_id)) - len(PCM)) <= 4


async def test_long_recording_is_appended_completely(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        await listens_by_hand(page)
        await page.send("input_audio_buffer.append", audio=AUDIO)
        await page.send("input_audio_buffer.commit")
        item_id = (await page.until("input_audio_buffer.committed"))["item_id"]
        assert abs(len(await audio_of(page, item_id)) - len(PCM)) <= 400


async def test_long_recording_in_a_response_is_joined_to_referenced_items(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        await page.send("conversation.item.create", item={**SPOKEN, "content": [{"type": "input_text", "text": "hello"}]})
        item_id = (await page.until("conversation.item.done"))["item"]["id"]
        given = [{"type": "item_reference", "id": item_id}, SPOKEN]
        await page.send("response.create", response={"conversation": "none", "input": given})
        assert (await page.until("response.done"))["response"]["status"] == "completed"
        await page.send("response.create", response={"input": [{"type": "item_reference", "id": "no-such-item"}, SPOKEN]})
        assert (await page.until("error"))["error"]["param"] == "response.input[0].id"


@pytest.mark.parametrize("kind", ["conversation.item.create", "response.create"])
async def test_mistake_in_a_long_event_is_named_with_its_field_and_event(gateway: ServedGateway, kind: str) -> None:
    wrong = {**SPOKEN, "role": "system"}
    event = {"item": wrong} if kind == "conversation.item.create" else {"response": {"input": [wrong]}}
    async with opened(gateway, "/v1/realtime") as page:
        await page.socket.send(json.dumps({"type": kind, "event_id": "mine", **event}))
        error = (await page.until("error"))["error"]
        assert error["event_id"] == "mine" and "only a user's content can be audio" in error["message"]
        await page.ask("hello")
        await page.until("response.done")


async def test_long_event_without_audio_is_refused_by_its_bound(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        session = {"type": "realtime", "instructions": "x" * MAX_PLAIN_BYTES}
        await page.send("session.update", event_id="mine", session=session)
        error = (await page.until("error"))["error"]
        assert error["code"] == "input_too_large" and error["event_id"] == "mine"
        assert error["message"].startswith("session.update: ") and str(MAX_PLAIN_BYTES) in error["message"]
        await page.ask("hello")
        await page.until("response.done")


async def test_session_with_many_tools_is_accepted(gateway: ServedGateway) -> None:
    parameters = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "x" * 60} for n in range(12)}}
    tools = [{"type": "function", "name": f"tool{n}", "description": "y" * 200, "parameters": parameters} for n in range(128)]
    async with opened(gateway, "/v1/realtime") as page:
        await page.send("session.update", session={"type": "realtime", "tools": tools, "instructions": "be brief"})
        assert (await page.until("session.updated"))["session"]["instructions"] == "be brief"
