"""Output of a voice session to a call: OpenAI's JSON over the data channel, and audio to the queue
that the call's track plays. Writing never waits. Knows no session.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from aiortc import RTCDataChannel
from aiortc.exceptions import InvalidStateError

from web.realtime.audio.formats import AudioFormat, PcmFormat
from web.realtime.protocol.server_events import (
    Error,
    ErrorDetail,
    FleetEvent,
    ResponseDone,
    ServerEvent,
    encode_event,
)
from web.realtime.webrtc.outgoing import OutgoingAudio, Played

log = logging.getLogger("fleet.web")

CHANNEL = "oai-events"
"""Label of the data channel that carries the events."""
MAX_QUEUED_BYTES = 16 * 1024 * 1024


class WebRtcWriter:
    """Writer of a call, a `client_connection.ClientWriter`. Events wait for the data channel;
    `on_close` closes the call with a close code.
    """

    plays = True

    def __init__(self, on_played: Played, on_close: Callable[[int], None], *, fleet: bool) -> None:
        self.audio = OutgoingAudio(self.send, on_played)
        self._on_close = on_close
        self._fleet = fleet
        self._channel: RTCDataChannel | None = None
        self._early: deque[str] = deque()
        self._is_closed = False
        self._sent = asyncio.Event()

    @property
    def takes_audio(self) -> bool:
        """Return True once the client has connected."""
        return self._channel is not None

    def open(self, channel: RTCDataChannel) -> None:
        """Send over `channel` from now on, beginning with the events that wait for it."""
        self._channel = channel
        channel.on("bufferedamountlow", self._sent.set)
        while self._early:
            self._send_text(channel, self._early.popleft())

    async def sent(self) -> None:
        """Wait until all events are sent; returns at once while there is no data channel."""
        while self._channel is not None and self._channel.bufferedAmount:
            self._sent.clear()
            await self._sent.wait()

    def send(self, event: ServerEvent) -> None:
        if self._is_closed or (isinstance(event, FleetEvent) and not self._fleet):
            return
        if isinstance(event, ResponseDone):
            self.audio.finish(event.response.id)
        text = encode_event(event)
        if self._channel is None:
            self._early.append(text)
        else:
            self._send_text(self._channel, text)

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None:
        assert form == PcmFormat(), "a writer that plays gets PCM16 at 24 kHz"
        self.audio.add(response_id, first_sample, audio)

    def clear_audio(self) -> None:
        self.audio.clear()

    def close(self, code: int, reason: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_close(code)

    def _send_text(self, channel: RTCDataChannel, text: str) -> None:
        try:
            channel.send(text)
        except InvalidStateError:
            log.debug("an event was dropped, since the client has closed its data channel")
        except ValueError:
            channel.send(encode_event(_too_large(len(text))))
        if channel.bufferedAmount > MAX_QUEUED_BYTES:
            log.info("a call ends: its client reads too slowly")
            self.close(1013, "the connection is too slow for what is sent over it")


def _too_large(num_chars: int) -> Error:
    message = (
        f"an event of {num_chars} characters does not fit into one message of this data channel; "
        "open a WebSocket to retrieve audio"
    )
    return Error(
        error=ErrorDetail(
            type="invalid_request_error",
            code="event_too_large",
            message=message,
            param=None,
            event_id=None,
        )
    )
