"""Output of a voice session to a socket: OpenAI's JSON with audio in base64, or the console's JSON
with audio in binary frames.

Writing never waits: a task sends the queued frames, and a client that reads too slowly is
disconnected. Knows no session.
"""

import asyncio
import logging
import struct
from base64 import b64encode
from collections import deque

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from fleet.process.background import start
from web.realtime.audio.formats import AudioFormat
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
from web.realtime.transport.refusal import clipped_reason

log = logging.getLogger("fleet.web")

MAX_QUEUED_BYTES = 16 * 1024 * 1024
TRY_AGAIN_LATER = 1013
HEADER = struct.Struct("<II")
"""Header of a binary frame: serial of the audio, and position of the frame's first sample in the
response's audio.
"""


class SocketWriter:
    """Writer of OpenAI's frames, a `client_connection.ClientWriter`. If `fleet` is True, Fleet's
    extensions (events `fleet.*`) are sent too. Clients play the audio themselves.
    """

    plays = False
    takes_audio = True

    def __init__(self, websocket: WebSocket, *, fleet: bool) -> None:
        self._websocket = websocket
        self._fleet = fleet
        self._frames: deque[str | bytes] = deque()
        self._queued_bytes = 0
        self._has_work = asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self._task = start(self._write(), "the writer of a voice client's socket")

    def send(self, event: ServerEvent) -> None:
        if self._fleet or not isinstance(event, FleetEvent):
            self._put(encode_event(event))

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None:
        self.send(
            OutputAudioDelta(
                response_id=response_id, item_id=item_id, delta=b64encode(audio).decode("ascii")
            )
        )

    def clear_audio(self) -> None:
        """Do nothing: the client discards what it has not played."""

    def send_position(self, position: int) -> None:
        """Send the client's position in the queue: as the event `fleet.queue`, or without
        extensions as an error, since OpenAI's protocol has no event for it.
        """
        if self._fleet:
            self.send(Queue(position=position))
            return
        message = (
            f"all sessions of this gateway are taken; place {position} in line, "
            "session.created follows when there is room"
        )
        detail = ErrorDetail(
            type="rate_limit_error",
            code="session_queued",
            message=message,
            param=None,
            event_id=None,
        )
        self.send(Error(error=detail))

    def close(self, code: int, reason: str) -> None:
        """Close the socket after the queued frames."""
        if self._closing is None:
            self._closing = (code, reason)
            self._has_work.set()

    async def finish(self) -> None:
        """Wait until the frames before a `close` are written; without a `close`, stop writing,
        since the connection is lost.
        """
        if self._closing is None:
            self._task.cancel()
        await asyncio.wait({self._task})

    def _put(self, frame: str | bytes) -> None:
        if self._closing is not None:
            return
        self._frames.append(frame)
        self._queued_bytes += len(frame)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._frames.clear()
            self.close(TRY_AGAIN_LATER, "the connection is too slow for what is sent over it")
        self._has_work.set()

    async def _write(self) -> None:
        try:
            while self._frames or self._closing is None:
                if not self._frames:
                    self._has_work.clear()
                    await self._has_work.wait()
                    continue
                frame = self._frames.popleft()
                self._queued_bytes -= len(frame)
                await (
                    self._websocket.send_text(frame)
                    if isinstance(frame, str)
                    else self._websocket.send_bytes(frame)
                )
            if self._websocket.application_state == WebSocketState.CONNECTED:
                code, reason = self._closing
                await self._websocket.close(code, clipped_reason(reason))
        except (WebSocketDisconnect, RuntimeError) as error:
            # Starlette raises RuntimeError once it has received the disconnect.
            log.debug("a voice client disconnected while its frames were written: %s", error)


class ConsoleWriter(SocketWriter):
    """Writer of the console's frames. Binary audio frames have a serial, which an `AudioSerial`
    event announces at the beginning of a response's audio and after each gap in it.
    """

    def __init__(self, websocket: WebSocket) -> None:
        super().__init__(websocket, fleet=True)
        self._serial = 0
        self._response_id = ""
        self._next_sample = 0

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None:
        if response_id != self._response_id or first_sample != self._next_sample:
            self._serial, self._response_id = self._serial + 1, response_id
            self.send(
                AudioSerial(
                    serial=self._serial, response_id=response_id, item_id=item_id, rate=form.rate
                )
            )
        self._next_sample = first_sample + len(audio) // form.sample_bytes
        self._put(HEADER.pack(self._serial, first_sample) + audio)
