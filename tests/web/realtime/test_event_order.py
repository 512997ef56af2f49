"""Valid client events in random order: the server's events stay consistent.

The state is checked twice: by `Mirror`, from the events alone, and at the end by retrieving every
item.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, Script
from tests.web.realtime.socket_client import Event, SocketClient, opened

NUM_EVENTS = 60
SOUND = "AQD//w" + "AAAA" * 2_000 + "AA"


@dataclass(slots=True)
class MirroredResponse:
    """State of a response, derived from its events so far."""

    in_conversation: bool
    spoken: bool
    item: str = ""
    begun: list[str] = field(default_factory=list[str])
    words: str = ""
    done: Event | None = None


class Mirror:
    """Client state derived from the server's events. Every event is checked against the protocol's
    invariants.
    """

    def __init__(self) -> None:
        self.items: list[str] = []
        self.whole: set[str] = set()
        self.responses: dict[str, MirroredResponse] = {}
        self.seen: set[str] = set()

    @property
    def active(self) -> list[str]:
        return [
            name
            for name, response in self.responses.items()
            if response.in_conversation and response.done is None
        ]

    def take(self, event: Event) -> None:
        assert event["event_id"] not in self.seen, "an event id occurs twice"
        self.seen.add(event["event_id"])
        kind = str(event["type"])
        if kind.startswith("response."):
            self._of_response(kind, event)
        elif kind.startswith("conversation.item."):
            self._of_item(kind.removeprefix("conversation.item."), event)
        elif kind == "error":
            assert event["error"]["type"] != "server_error", event

    def _of_item(self, kind: str, event: Event) -> None:
        if kind == "added":
            previous, name = event["previous_item_id"], event["item"]["id"]
            assert name not in self.items and (previous is None or previous in self.items), event
            self.items.insert(self.items.index(previous) + 1 if previous is not None else 0, name)
        elif kind == "done":
            name = event["item"]["id"]
            assert name in self.items and name not in self.whole, event
            assert event["item"]["status"] != "in_progress"
            self.whole.add(name)
        elif kind == "deleted":
            self.items.remove(event["item_id"])

    def _of_response(self, kind: str, event: Event) -> None:
        body: dict[str, Any] = event.get("response", {})
        if kind == "response.created":
            spoken = body["output_modalities"] == ["audio"]
            self.responses[body["id"]] = MirroredResponse(
                in_conversation=body["conversation_id"] is not None, spoken=spoken
            )
            assert (
                body["status"] == "in_progress" and body["usage"] is None and len(self.active) <= 1
            )
            return
        response = self.responses[body["id"] if body else event["response_id"]]
        assert response.done is None, f"{kind} after response.done"
        if kind == "response.done":
            self._is_whole(response, body)
        else:
            self._of_part(kind.removeprefix("response."), response, event)

    def _of_part(self, kind: str, response: MirroredResponse, event: Event) -> None:
        if kind == "output_item.added":
            assert not response.item
            response.item = event["item"]["id"]
        assert response.item == event.get("item_id", response.item), "another item"
        thing, _, what = kind.rpartition(".")
        if what == "added":
            response.begun.append(thing)
        elif what == "done":
            assert (
                response.begun.pop() == thing
                if thing in ("content_part", "output_item")
                else "content_part" in response.begun
            )
        else:
            assert "content_part" in response.begun, f"{kind} outside of its part"
        if thing in ("output_text", "output_audio_transcript"):
            response.words += event.get("delta", "")
            assert response.spoken == (thing != "output_text")
            assert what == "delta" or event.get("text", event.get("transcript")) == response.words

    def _is_whole(self, response: MirroredResponse, body: dict[str, Any]) -> None:
        assert (
            body["status"] != "in_progress"
            and body["usage"]["total_tokens"] >= 0
            and not response.begun
        )
        assert [item["id"] for item in body["output"]] == ([response.item] if response.item else [])
        assert (body["status_details"] is None) == (body["status"] == "completed")
        response.done = body


class OrderedClient:
    """A client that sends random events which are valid at that time, and sometimes invalid
    ones.
    """

    def __init__(self, seed: int, page: SocketClient, mirror: Mirror) -> None:
        self._random = random.Random(seed)
        self._page = page
        self._mirror = mirror

    async def act(self) -> None:
        choose, item = self._random.choice, self._random.choice([*self._mirror.items, "unknown"])
        kind, fields = choose(
            [
                (
                    "conversation.item.create",
                    {"item": self._item(), "previous_item_id": choose([None, "root", item])},
                ),
                ("conversation.item.create", {"item": self._item()}),
                ("conversation.item.delete", {"item_id": item}),
                ("conversation.item.retrieve", {"item_id": item}),
                (
                    "conversation.item.truncate",
                    {"item_id": item, "content_index": 0, "audio_end_ms": choose([0, 50, 9_000])},
                ),
                ("response.create", {}),
                (
                    "response.create",
                    {"response": {"output_modalities": [choose(["text", "audio"])]}},
                ),
                ("response.create", {"response": self._aside(item)}),
                ("response.cancel", {}),
                ("response.cancel", {"response_id": choose([*self._mirror.responses, "unknown"])}),
                ("input_audio_buffer.append", {"audio": SOUND}),
                ("input_audio_buffer.commit", {}),
                ("input_audio_buffer.clear", {}),
                (
                    "session.update",
                    {
                        "session": {
                            "type": "realtime",
                            "audio": {"input": {"turn_detection": self._detection()}},
                        }
                    },
                ),
                (
                    "session.update",
                    {
                        "session": {
                            "type": "realtime",
                            "output_modalities": [choose(["text", "audio"])],
                        }
                    },
                ),
            ]
        )
        await self._page.send(kind, **fields)

    def _item(self) -> dict[str, object]:
        role, part = self._random.choice(
            [
                ("user", {"type": "input_text", "text": "hello"}),
                ("user", {"type": "input_audio", "audio": SOUND}),
                ("assistant", {"type": "output_text", "text": "yes"}),
                ("system", {"type": "input_text", "text": "be brief"}),
            ]
        )
        return {"type": "message", "role": role, "content": [part]}

    def _aside(self, item: str) -> dict[str, object]:
        return {
            "conversation": "none",
            "input": [{"type": "item_reference", "id": item}, self._item()],
        }

    def _detection(self) -> dict[str, object] | None:
        return self._random.choice(
            [None, {"type": "server_vad"}, {"type": "semantic_vad", "create_response": False}]
        )


async def until_after(page: SocketClient, mirror: Mirror, name: str) -> None:
    """Send an event that is refused, and read all events up to its refusal."""
    await page.send("no.such.event", event_id=name)
    while True:
        event = await page.next()
        assert event is not None
        mirror.take(event)
        if event["type"] == "error" and event["error"]["event_id"] == name:
            return


@pytest.mark.parametrize("seed", range(8))
async def test_events_in_any_order_stay_consistent(gateway: ServedGateway, seed: int) -> None:
    chance = random.Random(seed)
    async with opened(gateway, "/v1/realtime") as page:
        mirror = Mirror()
        client = OrderedClient(seed, page, mirror)
        for number in range(NUM_EVENTS):
            samples = chance.choice([0, 1, 4_800, 40_000])
            gateway.client.script = Script(
                text="One. Two.",
                num_samples=samples,
                samples_per_chunk=FRAME_SAMPLES,
                gap_s=chance.choice([0, 0, 0.002]),
                end_token=chance.random() < 0.8,
                fail_at=chance.choice([None, None, None, 2]),
            )
            await client.act()
            if chance.random() < 0.5:
                await until_after(page, mirror, f"after-{number}")
        gateway.client.script = Script()
        # only then are all responses known that were asked for
        await until_after(page, mirror, "sent")
        async with asyncio.timeout(20):
            while any(response.done is None for response in mirror.responses.values()):
                event = await page.next()
                if event is not None:
                    mirror.take(event)
        await until_after(page, mirror, "last")
        assert mirror.whole >= set(mirror.items), "an item without an end"
        for name in mirror.items:
            await page.send("conversation.item.retrieve", item_id=name)
            assert (await page.until("conversation.item.retrieved"))["item"]["id"] == name
