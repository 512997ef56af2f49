"""Output of a voice session to a telephone call. Audio is sent ahead of playback, with marks that
the telephone returns as it plays them; what was not played is discarded when the caller speaks.

Knows no session.
"""

import logging
from base64 import b64encode

from starlette.websockets import WebSocket

from web.realtime.audio.formats import AudioFormat
from web.realtime.protocol.client_events import Played
from web.realtime.protocol.server_events import Error, ResponseDone, ServerEvent, SpeechStarted
from web.realtime.telephone.messages import (
    Mark,
    Payload,
    Sent,
    SentClear,
    SentMark,
    SentMedia,
    encode_message,
)
from web.realtime.transport.socket_writers import SocketWriter

log = logging.getLogger("fleet.web")

MAX_MARKS = 1000
"""Limit of the awaited marks, one for each piece of audio; beyond it the oldest mark is forgotten.
"""


class CallWriter(SocketWriter):
    """Writer of a call's messages. `interrupts`: True if the caller's speech ends the response."""

    def __init__(self, websocket: WebSocket, stream_sid: str, *, interrupts: bool) -> None:
        super().__init__(websocket, fleet=True)
        self._stream_sid, self._interrupts = stream_sid, interrupts
        self._is_logged = False
        self._awaited: dict[str, Played] = {}
        """Playback report for each awaited mark, by the mark's name and in the order of the audio.
        """

    def send(self, event: ServerEvent) -> None:
        match event:
            case SpeechStarted():
                if self._interrupts:
                    self._clear()
            case ResponseDone():
                if event.response.status == "cancelled":
                    self._clear()
            case Error():
                self._log(event.error.message)
            case _:
                pass

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None:
        end = first_sample + len(audio) // form.sample_bytes
        name = f"{response_id}:{end}"
        payload = Payload(b64encode(audio).decode("ascii"))
        self._write_message(SentMedia(self._stream_sid, payload))
        self._write_message(SentMark(self._stream_sid, Mark(name)))
        self._awaited[name] = Played(type="fleet.played", response_id=response_id, samples=end)
        if len(self._awaited) > MAX_MARKS:
            del self._awaited[next(iter(self._awaited))]

    def send_position(self, position: int) -> None:
        """Send nothing: a caller in the queue hears silence."""

    def played(self, mark: str) -> Played | None:
        """Return and forget the playback report for a mark that the telephone has returned; None
        for a mark of discarded audio, which is returned too.
        """
        return self._awaited.pop(mark, None)

    def _clear(self) -> None:
        if self._awaited:
            self._awaited.clear()
            self._write_message(SentClear(self._stream_sid))

    def _log(self, message: str) -> None:
        """Log an error, only the first one of the call, since each piece of a caller's audio may
        cause one.
        """
        if not self._is_logged:
            self._is_logged = True
            log.warning("call %r: %s", self._stream_sid, message)

    def _write_message(self, message: Sent) -> None:
        self._put(encode_message(message))
