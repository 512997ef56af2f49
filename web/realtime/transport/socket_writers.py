"""How a session is written to a socket: OpenAI's JSON with sound in base64, or the console's JSON with sound in binary frames.

Writing never waits: frames queue for a task of their own, and a client that reads too slowly is disconnected. Knows no session.
"""

import asyncio
import logging
import struct
from base64 import b64encode
from collections import deque

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from web.realtime.protocol.server_events import (
    AudioSerial,
    Error,
    ErrorDetail,
    FleetEvent,
    OutputAudioDelta,
    Queue,
    ServerEvent,
    encode_event,
)
from web.realtime.protocol.settings import OUTPUT_RATE_HZ
from web.realtime.transport.refusal import clipped_reason

log = logging.getLogger("fleet.web")

MAX_QUEUED_BYTES = 16 * 1024 * 1024
TOO_SLOW = 1013
HEADER = struct.Struct("<II")
"""Serial, and the first sample's place in its response's sound."""


class SocketPort:
    """OpenAI's frames. Satisfies `line.Port`. `fleet`: whether events of ours are told."""

    def __init__(self, websocket: WebSocket, *, fleet: bool) -> None:
        self._websocket = websocket
        self._fleet = fleet
        self._frames: deque[str | bytes] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self._writer = asyncio.create_task(self._write())

    def tell(self, event: ServerEvent) -> None:
        if self._fleet or not isinstance(event, FleetEvent):
            self._put(encode_event(event))

    def sound(self, response_id: str, item_id: str, first_sample: int, pcm: bytes) -> None:
        self.tell(OutputAudioDelta(response_id=response_id, item_id=item_id, delta=b64encode(pcm).decode("ascii")))

    def position(self, position: int) -> None:
        """The client's place in line; OpenAI's protocol has no other word for it than an error."""
        if self._fleet:
            self.tell(Queue(position=position))
            return
        message = f"all sessions of this gateway are taken; place {position} in line, session.created follows when there is room"
        detail = ErrorDetail(type="rate_limit_error", code="session_queued", message=message, param=None, event_id=None)
        self.tell(Error(error=detail))

    def close(self, code: int, reason: str) -> None:
        """After what is queued."""
        if self._closing is None:
            self._closing = (code, reason)
            self._more.set()

    async def finish(self) -> None:
        """The connection is over, or is closed as soon as everything is written."""
        if self._closing is None:
            self._writer.cancel()
        await asyncio.wait({self._writer})

    def _put(self, frame: str | bytes) -> None:
        if self._closing is not None:
            return
        self._frames.append(frame)
        self._queued_bytes += len(frame)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._frames.clear()
            self.close(TOO_SLOW, "the connection is too slow for what is sent over it")
        self._more.set()

    async def _write(self) -> None:
        try:
            while self._frames or self._closing is None:
                if not self._frames:
                    self._more.clear()
                    await self._more.wait()
                    continue
                frame = self._frames.popleft()
                self._queued_bytes -= len(frame)
                await (self._websocket.send_text(frame) if isinstance(frame, str) else self._websocket.send_bytes(frame))
            if self._websocket.application_state == WebSocketState.CONNECTED:
                code, reason = self._closing
                await self._websocket.close(code, clipped_reason(reason))
        except (WebSocketDisconnect, RuntimeError) as error:
            # Starlette says RuntimeError where it has been told of the disconnect already.
            log.debug("a voice client left while it was written to: %s", error)


class ConsolePort(SocketPort):
    """The console's frames: each response's sound has a serial, announced before its first frame and after each break in it."""

    def __init__(self, websocket: WebSocket) -> None:
        super().__init__(websocket, fleet=True)
        self._serial = 0
        self._of = ""
        self._next = 0

    def sound(self, response_id: str, item_id: str, first_sample: int, pcm: bytes) -> None:
        if response_id != self._of or first_sample != self._next:
            self._serial, self._of = self._serial + 1, response_id
            self.tell(AudioSerial(serial=self._serial, response_id=response_id, item_id=item_id, rate=OUTPUT_RATE_HZ))
        self._next = first_sample + len(pcm) // 2
        self._put(HEADER.pack(self._serial, first_sample) + pcm)
