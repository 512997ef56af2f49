"""Audio of responses that waits to be played to the client of a call, in frames of 20 ms.

Pure: the caller takes the frames at the speed of playback.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from web.gateway.answer import BYTES_PER_SAMPLE
from web.realtime.protocol.server_events import (
    OutputCleared,
    OutputStarted,
    OutputStopped,
    ServerEvent,
)
from web.realtime.protocol.settings import OUTPUT_RATE_HZ

FRAME_MS = 20
FRAME_SAMPLES = OUTPUT_RATE_HZ * FRAME_MS // 1000
FRAME_BYTES = FRAME_SAMPLES * BYTES_PER_SAMPLE
REPORT_FRAMES = 10
"""Number of frames (200 ms) after which the position of playback is reported."""


@dataclass(slots=True, kw_only=True)
class _Speech:
    """Audio of one response. `position` is its first sample that has not been played; `pcm` is the
    audio from there on.
    """

    response_id: str
    position: int
    pcm: bytearray = field(default_factory=bytearray)
    is_started: bool = False
    is_starved: bool = False
    """True if a frame was due before its audio had arrived."""
    is_finished: bool = False
    num_frames: int = 0


Played = Callable[[str, int, int], None]
"""Function that takes a response's id, the number of its samples played so far, and the number of
interruptions since the last report.
"""


class OutgoingAudio:
    """Queue of the audio to play, which emits the events of the output buffer.

    Invariants: a frame has audio of one response; a response's last frame is filled with silence.
    """

    def __init__(self, send: Callable[[ServerEvent], None], on_played: Played) -> None:
        self._send, self._on_played = send, on_played
        self._queue: deque[_Speech] = deque()

    def add(self, response_id: str, first_sample: int, pcm: bytes) -> None:
        """Append PCM16 audio of a response, from `first_sample` on. If the audio does not follow
        the response's last sample, the waiting audio of the response is discarded first.
        """
        speech = next((one for one in self._queue if one.response_id == response_id), None)
        if speech is None:
            speech = _Speech(response_id=response_id, position=first_sample)
            self._queue.append(speech)
        elif first_sample != speech.position + len(speech.pcm) // BYTES_PER_SAMPLE:
            speech.pcm.clear()
            speech.position = first_sample
        speech.pcm += pcm

    def finish(self, response_id: str) -> None:
        """Record that no more audio of a response will come."""
        for speech in self._queue:
            speech.is_finished |= speech.response_id == response_id

    def clear(self) -> None:
        """Discard all audio that has not been played."""
        if self._queue:
            self._send(OutputCleared(response_id=self._queue[0].response_id))
        self._queue.clear()

    def next_frame(self) -> bytes | None:
        """Return the next frame to play; None for silence. Sends the events and playback reports
        that are due.
        """
        while self._queue:
            speech = self._queue[0]
            is_last = speech.is_finished or len(self._queue) > 1
            if len(speech.pcm) >= FRAME_BYTES or (is_last and speech.pcm):
                return self._take(speech)
            if not is_last:
                speech.is_starved = speech.is_started
                return None
            self._queue.popleft()
            if speech.is_started:
                self._on_played(speech.response_id, speech.position, 0)
                self._send(OutputStopped(response_id=speech.response_id))
        return None

    def _take(self, speech: _Speech) -> bytes:
        if not speech.is_started:
            speech.is_started = True
            self._send(OutputStarted(response_id=speech.response_id))
        if speech.num_frames % REPORT_FRAMES == 0 or speech.is_starved:
            self._on_played(speech.response_id, speech.position, int(speech.is_starved))
            speech.is_starved = False
        speech.num_frames += 1
        frame = bytes(speech.pcm[:FRAME_BYTES])
        del speech.pcm[:FRAME_BYTES]
        speech.position += len(frame) // BYTES_PER_SAMPLE
        return frame.ljust(FRAME_BYTES, b"\0")
