"""Client of `WS /v1/audio/speech/stream`, which speaks a text while it arrives: events of the
client and the server, and a blocking session that receives PCM.
"""

from collections.abc import Iterator
from contextlib import suppress

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from fleet.lab.client.errors import ApiError
from fleet.lab.client.transport import ErrorMessage

SILENT_S = 60.0
"""Longest wait for a WebSocket frame from the gateway."""
SPOKEN = "session.done"
"""Type of the event that ends an utterance."""


class SpeechRefused(ApiError):
    """The gateway sent an error event on a speech socket, for example because it does not serve the
    model or a setting. `refusal`: code of the error event, "" if it has none.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(f"the speech socket refuses: {message}")
        self.refusal = code


class _SpeechFailure(ErrorMessage, frozen=True):
    code: str | None = None


class _SpeechEvent(msgspec.Struct, frozen=True):
    """An event of the server. `error` is the failure in an error event, and True at the end of a
    clause that failed.
    """

    type: str
    error: _SpeechFailure | bool = False


_decode = msgspec.json.Decoder(_SpeechEvent).decode
_encode = msgspec.json.Encoder().encode


class GrowingSpeech:
    """A speech socket, on which one utterance is spoken at a time."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    def configure(self, **settings: object) -> None:
        """Set how the next utterances are spoken. `settings`: fields of the `session.config` event,
        such as `seed`. The audio is always PCM, sent while it is generated.
        """
        self._send("session.config", response_format="pcm", stream_audio=True, **settings)

    def add(self, text: str) -> None:
        """Send the next piece of the utterance's text."""
        self._send("input.text", text=text)

    def finish(self) -> None:
        """End the utterance's text."""
        self._send("input.done")

    def __iter__(self) -> Iterator[bytes]:
        """Yield the PCM16 of the utterance until it is spoken. Raises: SpeechRefused for an error
        event; TimeoutError after `SILENT_S` without a frame; ConnectionClosed.
        """
        while True:
            message = self._socket.recv(SILENT_S)
            if isinstance(message, bytes):
                yield message
                continue
            event = _decode(message)
            if isinstance(event.error, _SpeechFailure):
                raise SpeechRefused(event.error.message, event.error.code or "")
            if event.type == SPOKEN:
                return

    def _send(self, kind: str, **fields: object) -> None:
        # A socket that the server has closed takes nothing more; its error event tells why.
        with suppress(ConnectionClosed):
            self._socket.send(_encode({"type": kind, **fields}).decode())
