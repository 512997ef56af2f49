"""Client of WS /v1/audio/speech/stream, which collects its events and audio."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

Event = dict[str, Any]
PATIENCE_S = 60


@dataclass(slots=True)
class SpeechStreamClient:
    """`audio`: bytes of each binary frame, in order."""

    socket: ClientConnection
    events: list[Event] = field(default_factory=list[Event])
    audio: list[bytes] = field(default_factory=list[bytes])

    def send(self, kind: str, **fields: object) -> None:
        """Send an event. A socket that the server has closed takes none, as `closed` tells."""
        with suppress(ConnectionClosed):
            self.socket.send(json.dumps({"type": kind, **fields}))

    def configure(self, **fields: object) -> None:
        self.send("session.config", **{"response_format": "pcm", **fields})

    def say(self, *pieces: str) -> None:
        """Send an utterance in pieces."""
        for piece in pieces:
            self.send("input.text", text=piece)
        self.send("input.done")

    def next(self) -> Event | None:
        """Return the next event; None after a binary frame."""
        frame = self.socket.recv(PATIENCE_S)
        if isinstance(frame, bytes):
            self.audio.append(frame)
            return None
        event: Event = json.loads(frame)
        self.events.append(event)
        return event

    def until(self, kind: str, **fields: object) -> Event:
        while True:
            event = self.next()
            if event is not None and event["type"] == kind and fields.items() <= event.items():
                return event

    def closed(self) -> int:
        """Read until the server closes the socket; return the close code."""
        try:
            while True:
                self.next()
        except ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code

    def said(self, utterance: int = 0) -> list[str]:
        """Return the texts of an utterance's clauses."""
        return [
            event["sentence_text"]
            for event in self.events
            if event["type"] == "audio.start" and event["utterance_index"] == utterance
        ]


@contextmanager
def speech_stream(url: str, key: str | None = None) -> Iterator[SpeechStreamClient]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    address = f"{url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
    with connect(address, max_size=None, additional_headers=headers) as socket:
        yield SpeechStreamClient(socket)
