"""Connection of a voice session to its client, which may be disconnected for a while; events are
then stored up to a limit.

Knows no protocol: a writer turns events and audio into frames.
"""

from collections import deque
from typing import Protocol

from web.realtime.audio.formats import AudioFormat, PcmFormat
from web.realtime.protocol.server_events import ServerEvent, State

PLAYED_AHEAD_S = 0.4
"""Seconds ahead of playback at which audio is given to a writer that plays it: enough for an event
loop that stands still for a moment.
"""
MAX_MISSED = 2000
"""Limit of the events stored for a disconnected client; enough for minutes of transcript, since
audio is not stored.
"""


class ClientWriter(Protocol):
    """Interface of the output to one socket. Its methods never wait: a client that reads too slowly
    is disconnected, and may reconnect.

    `plays` is True for a writer that sends audio at the speed of playback: what it has not sent can
    still be taken back. Such a writer gets PCM16 whatever the session's format. `takes_audio` is
    False while a writer cannot play.
    """

    @property
    def plays(self) -> bool: ...

    @property
    def takes_audio(self) -> bool: ...

    def send(self, event: ServerEvent) -> None: ...

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None: ...

    def clear_audio(self) -> None:
        """Discard the audio that has not been played yet, if the writer plays it."""

    def close(self, code: int, reason: str) -> None: ...


class ClientConnection:
    def __init__(self) -> None:
        self._writer: ClientWriter | None = None
        self._missed: deque[ServerEvent] = deque(maxlen=MAX_MISSED)

    @property
    def is_attached(self) -> bool:
        return self._writer is not None

    @property
    def takes_audio(self) -> bool:
        return self._writer is not None and self._writer.takes_audio

    @property
    def plays(self) -> bool:
        """Return True if audio that was sent can still be taken back by `clear_audio`."""
        return self._writer is not None and self._writer.plays

    def form(self, requested: AudioFormat) -> AudioFormat:
        """Return the format in which audio is sent to the client for a response in the format
        `requested`.
        """
        return PcmFormat() if self.plays else requested

    def ahead_s(self, limit_s: float) -> float:
        """Return how far ahead of playback audio may be sent; at most `limit_s`."""
        return min(limit_s, PLAYED_AHEAD_S) if self.plays else limit_s

    def attach(self, writer: ClientWriter) -> None:
        """Send to the socket of `writer` from now on, and close the former socket."""
        if self._writer is not None and self._writer is not writer:
            self._writer.close(1008, "the session continues over another connection")
        self._writer = writer

    def send_missed(self) -> None:
        while self._missed:
            self.send(self._missed.popleft())

    def is_attached_to(self, writer: ClientWriter) -> bool:
        return self._writer is writer

    def detach(self) -> None:
        self._writer = None

    def close(self, code: int, reason: str) -> None:
        if self._writer is not None:
            self._writer.close(code, reason)
            self._writer = None

    def send(self, event: ServerEvent) -> None:
        if self._writer is not None:
            self._writer.send(event)
        elif not isinstance(event, State):
            self._missed.append(event)

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None:
        """Send audio of a response in the format `form`; `first_sample` is the position of its
        first sample, counted in that format. Without a client the audio is dropped.
        """
        if self._writer is not None:
            self._writer.send_audio(response_id, item_id, first_sample, audio, form)

    def clear_audio(self) -> None:
        if self._writer is not None:
            self._writer.clear_audio()
