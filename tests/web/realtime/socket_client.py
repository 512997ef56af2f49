"""Client of both voice sockets, which collects events by type, and audio by response."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect

from tests.web.realtime.openai_types import check_event
from tests.web.realtime.speech_samples import blocks

Event = dict[str, Any]
BLOCK_MS = 100


class Addressed(Protocol):
    """A gateway that a client can reach at `url`."""

    @property
    def url(self) -> str: ...


def message(
    text: str, role: str = "user", kind: str = "input_text", **fields: object
) -> dict[str, object]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


def transcript(item: Event) -> str:
    return item["content"][0]["transcript"]


@dataclass(slots=True)
class SocketClient:
    socket: ClientConnection
    session: str = ""
    events: list[Event] = field(default_factory=list[Event])
    audio: dict[str, bytearray] = field(default_factory=dict[str, bytearray])
    """Received audio by response id, from the first sample that was sent to this socket."""
    first: dict[str, int] = field(default_factory=dict[str, int])
    serials: dict[int, str] = field(default_factory=dict[int, str])

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def ask(self, text: str, **response: object) -> None:
        await self.send("conversation.item.create", item=message(text))
        await self.send("response.create", response=response)

    async def complete(self, text: str | None = None, /, **response: object) -> Event:
        """Send `text` (or nothing, after speech), request a response, and return it once it is
        complete.
        """
        if text is None:
            await self.send("response.create", response=response)
        else:
            await self.ask(text, **response)
        return await self.completed()

    async def completed(self) -> Event:
        done = await self.done()
        assert done["status"] == "completed", done
        return done

    async def done(self) -> Event:
        """Return the next response that is done."""
        return (await self.until("response.done"))["response"]

    async def error(self) -> Event:
        return (await self.until("error"))["error"]

    async def speak(self, pcm: bytes) -> None:
        """Send audio as the console's page does, in binary frames."""
        for block in blocks(pcm, BLOCK_MS):
            await self.socket.send(block)

    async def append(self, pcm: bytes) -> None:
        """Send audio as OpenAI's clients do, as base64 in JSON events."""
        for block in blocks(pcm, BLOCK_MS):
            await self.send("input_audio_buffer.append", audio=base64.b64encode(block).decode())

    async def update(self, **session: object) -> tuple[list[Event], Event]:
        """Update the session's settings. Return the errors that arrive before `session.updated`,
        and the session in that event.
        """
        begin = len(self.events)
        await self.send("session.update", event_id="asked", session=session)
        session_now = (await self.until("session.updated"))["session"]
        errors = [event["error"] for event in self.events[begin:] if event["type"] == "error"]
        assert all(error["event_id"] == "asked" for error in errors), errors
        return errors, session_now

    async def detect_turns(self, detection: object) -> None:
        await self.update(audio={"input": {"turn_detection": detection}})

    async def retrieve(self, item_id: str) -> Event:
        """Return a conversation item by its id."""
        await self.send("conversation.item.retrieve", item_id=item_id)
        return (await self.until("conversation.item.retrieved"))["item"]

    async def events_before_refusal(self, event_id: str = "after") -> list[Event]:
        """Send an unknown event; return all events that arrive before its refusal."""
        begin = len(self.events)
        await self.send("no.such.event", event_id=event_id)
        while (
            not self.events[begin:] or self.events[-1].get("error", {}).get("event_id") != event_id
        ):
            await self.next()
        return self.events[begin:-1]

    async def refusal_of(self, kind: str, **fields: object) -> Event:
        """Send an event and return its only error, which names the field and the event."""
        await self.send(kind, event_id="asked", **fields)
        (answer,) = await self.events_before_refusal()
        error: Event = answer["error"]
        assert error["event_id"] == "asked"
        assert error["param"] is None or str(error["message"]).startswith(str(error["param"])), (
            error
        )
        return error

    async def next(self) -> Event | None:
        """Return the next JSON event, or None after a binary audio frame, which is stored."""
        frame = await asyncio.wait_for(self.socket.recv(), 60)
        if isinstance(frame, bytes):
            serial, first = struct.unpack("<II", frame[:8])
            response = self.serials[serial]
            audio = self.audio.setdefault(response, bytearray())
            start = self.first.setdefault(response, first)
            assert first == start + len(audio) // 2, "audio has a gap or arrives twice"
            audio += frame[8:]
            return None
        event: Event = json.loads(frame)
        check_event(event)
        if event["type"] == "fleet.audio":
            self.serials[event["serial"]] = event["response_id"]
        elif event["type"] == "session.created":
            self.session = event["session"]["id"]
        self.events.append(event)
        return event

    async def until(self, kind: str, **fields: object) -> Event:
        while True:
            event = await self.next()
            if event is not None and event["type"] == kind and fields.items() <= event.items():
                return event

    async def until_audio(self, response: str, num_samples: int) -> None:
        while len(self.audio.get(response, b"")) // 2 < num_samples:
            await self.next()

    def shown(self, response: str, had: str = "") -> str:
        """Return a response's text as the console shows it. `had`: text of the response that the
        client had before.
        """
        text = had
        for event in self.events:
            if (
                event["type"] == "response.output_audio_transcript.delta"
                and event["response_id"] == response
            ):
                text += event["delta"]
            elif event["type"] == "fleet.resumed" and event["response_id"] == response:
                text = event["transcript"] or text
        return text

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    async def closed(self) -> tuple[int | None, str]:
        """Wait until the server closes the connection; return the close code and reason."""
        await asyncio.wait_for(self.socket.wait_closed(), 20)
        return self.socket.close_code, self.socket.close_reason or ""

    async def drop(self) -> None:
        """Break the connection without a close handshake."""
        self.socket.transport.abort()
        await self.socket.wait_closed()


@asynccontextmanager
async def opened(
    gateway: Addressed, path: str = "/console/ws", **query: object
) -> AsyncIterator[SocketClient]:
    query_string = "&".join(f"{name}={value}" for name, value in query.items())
    async with connect(
        f"{gateway.url.replace('http', 'ws')}{path}?{query_string}", max_size=None, max_queue=None
    ) as socket:
        page = SocketClient(socket)
        await page.until("session.created")
        yield page
