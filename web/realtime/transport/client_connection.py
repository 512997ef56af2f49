"""The client's end of a session: there, or away for a while. What it misses is kept, within bounds, until it is back.

Knows no protocol: a port turns events and sound into frames.
"""

from collections import deque
from typing import Protocol

from web.realtime.protocol.server_events import ServerEvent, State

MAX_MISSED = 2000
"""Events, none of them sound: minutes of transcript."""


class Port(Protocol):
    """One socket's way of writing. Never waits: who reads too slowly is disconnected, and may come back."""

    def tell(self, event: ServerEvent) -> None: ...

    def sound(self, response_id: str, item_id: str, first_sample: int, pcm: bytes) -> None: ...

    def close(self, code: int, reason: str) -> None: ...


class ClientConnection:
    def __init__(self) -> None:
        self._port: Port | None = None
        self._missed: deque[ServerEvent] = deque(maxlen=MAX_MISSED)

    @property
    def listening(self) -> bool:
        return self._port is not None

    def attach(self, port: Port) -> None:
        """Whoever was there before is sent away."""
        if self._port is not None and self._port is not port:
            self._port.close(1008, "the session goes on over another connection")
        self._port = port

    def catch_up(self) -> None:
        while self._missed:
            self.tell(self._missed.popleft())

    def is_of(self, port: Port) -> bool:
        return self._port is port

    def detach(self) -> None:
        self._port = None

    def hang_up(self, code: int, reason: str) -> None:
        if self._port is not None:
            self._port.close(code, reason)
            self._port = None

    def tell(self, event: ServerEvent) -> None:
        if self._port is not None:
            self._port.tell(event)
        elif not isinstance(event, State):
            self._missed.append(event)

    def sound(self, response_id: str, item_id: str, first_sample: int, pcm: bytes) -> None:
        if self._port is not None:
            self._port.sound(response_id, item_id, first_sample, pcm)
