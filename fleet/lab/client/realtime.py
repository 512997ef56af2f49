"""Voice sessions over `WS /v1/realtime`: client events, server events, and a blocking session that
speaks in real time.
"""

import time
from base64 import b64encode
from collections.abc import Iterator

import msgspec
from websockets.sync.client import ClientConnection

from fleet.lab.client.audio import BYTES_PER_S
from fleet.lab.client.errors import ApiError
from fleet.lab.client.transport import ErrorMessage

BLOCK_MS = 20
"""Length of the audio blocks that a browser sends."""
BLOCK_BYTES = BYTES_PER_S * BLOCK_MS // 1000
SERIAL_BYTES = 8
"""Length of the serial number before the PCM in binary audio frames of the console's socket."""


class LatencyPart(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of one part of the wait for an answer, from the fleet's `fleet.timing` event."""

    name: str
    ms: float


class _Failure(ErrorMessage, frozen=True):
    code: str | None = None


class _StatusDetails(msgspec.Struct, frozen=True):
    error: _Failure | None = None


class RealtimeResponse(msgspec.Struct, frozen=True):
    id: str = ""
    status: str = ""
    status_details: _StatusDetails | None = None

    @property
    def code(self) -> str:
        """Error code of a failed response, "" if it has none."""
        error = self.status_details.error if self.status_details is not None else None
        return (error.code or "") if error is not None else ""

    @property
    def failure(self) -> str:
        """Message of the response's error, or the bare status if it has none."""
        error = self.status_details.error if self.status_details is not None else None
        return error.message if error is not None else self.status


class _ItemPart(msgspec.Struct, frozen=True):
    transcript: str | None = None


class RealtimeItem(msgspec.Struct, frozen=True):
    """An item of the conversation; only transcripts of its content are decoded."""

    id: str = ""
    content: tuple[_ItemPart, ...] = ()

    @property
    def transcript(self) -> str:
        return "".join(part.transcript or "" for part in self.content)


class _SessionId(msgspec.Struct, frozen=True):
    id: str = ""


class RealtimeEvent(msgspec.Struct, frozen=True):
    """A server event of any type, with the fields that this client reads."""

    type: str
    delta: str = ""
    transcript: str = ""
    request_id: str = ""
    response_id: str | None = None
    session: _SessionId = _SessionId()
    item: RealtimeItem = RealtimeItem()
    position: int | None = None
    parts: tuple[LatencyPart, ...] = ()
    response: RealtimeResponse = RealtimeResponse()
    error: ErrorMessage = ErrorMessage()


_decode = msgspec.json.Decoder(RealtimeEvent).decode
_encode = msgspec.json.Encoder().encode


def decode_any_event(message: str | bytes) -> RealtimeEvent:
    """Decode a server event, which may be an error event."""
    return _decode(message)


def decode_event(message: str | bytes) -> RealtimeEvent:
    """Decode a server event. Raises: ApiError if it is an error event."""
    event = _decode(message)
    if event.type == "error":
        raise ApiError(f"the voice session reports an error: {event.error.message}")
    return event


def encode_event(event_type: str, **fields: object) -> str:
    return _encode({"type": event_type, **fields}).decode()


def append_audio(pcm: bytes) -> str:
    return encode_event("input_audio_buffer.append", audio=b64encode(pcm).decode())


def update_audio_input(**settings: object) -> str:
    """Return the client event that changes settings of the session's audio input, such as
    `turn_detection`.
    """
    return encode_event(
        "session.update", session={"type": "realtime", "audio": {"input": settings}}
    )


class RealtimeSession:
    """A voice session on a blocking WebSocket. Raises: ApiError for an error event."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    def send(self, event: str) -> None:
        self._socket.send(event)

    def __iter__(self) -> Iterator[RealtimeEvent]:
        return (decode_event(message) for message in self._socket)

    def speak(self, pcm: bytes, from_s: float) -> float:
        """Send `pcm` in blocks, each at the time at which a microphone would have recorded it.
        `from_s`: time at which the speech begins. Return the time at which the speech ends.

        Units: seconds on `time.perf_counter`.
        """
        for start in range(0, len(pcm), BLOCK_BYTES):
            block = pcm[start : start + BLOCK_BYTES]
            from_s += len(block) / BYTES_PER_S
            time.sleep(max(0.0, from_s - time.perf_counter()))
            self.send(append_audio(block))
        return from_s
