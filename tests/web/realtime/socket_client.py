"""Client of both voice sockets: events by type, and audio by its serial."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.web.conftest import ServedGateway
from tests.web.realtime.openai_types import check_event

Event = dict[str, Any]


@dataclass(slots=True)
class SocketClient:
    socket: ClientConnection
    session: str = ""
    events: list[Event] = field(default_factory=list[Event])
    audio: dict[str, bytearray] = field(default_factory=dict[str, bytearray])
    """Audio by response, from the first sample that was sent to this socket."""
    first: dict[str, int] = field(default_factory=dict[str, int])
    serials: dict[int, str] = field(default_factory=dict[int, str])

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def ask(self, text: str, **response: object) -> None:
        content = [{"type": "input_text", "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.send("response.create", response=response)

    async def next(self) -> Event | None:
        """Return the next event; None for a frame of audio, which is stored."""
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
        """Return a response's text as the console shows it, after the text that it had already."""
        text = had
        for event in self.events:
            if event["type"] == "response.output_audio_transcript.delta" and event["response_id"] == response:
                text += event["delta"]
            elif event["type"] == "fleet.resumed" and event["response_id"] == response:
                text = event["transcript"] or text
        return text

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    async def drop(self) -> None:
        """Break the connection without a close."""
        self.socket.transport.abort()
        await self.socket.wait_closed()


@asynccontextmanager
async def opened(gateway: ServedGateway, path: str = "/console/ws", **query: object) -> AsyncIterator[SocketClient]:
    query_string = "&".join(f"{name}={value}" for name, value in query.items())
    async with connect(f"{gateway.url.replace('http', 'ws')}{path}?{query_string}", max_size=None, max_queue=None) as socket:
        page = SocketClient(socket)
        created = await page.until("session.created")
        page.session = created["session"]["id"]
        yield page
