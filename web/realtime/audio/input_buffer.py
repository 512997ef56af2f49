"""What a session hears: bytes as they come, resampled, kept while they may belong to a turn, and cut into frames to judge.

Knows no conversation and no socket.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import soxr
from numpy.typing import NDArray

from web.realtime.audio.turn_detector import FRAME_SAMPLES, RATE_HZ, Stopped, TurnDetector, TurnEvent, TurnRules
from web.realtime.audio.vad import Samples, Vad

Pcm = NDArray[np.int16]
SLICE_S = 0.5
"""Of what comes at once, so much is judged before others of the process have their turn."""
STILL = 52
"""Of 32768, 56 dB below the loudest: what browsers and headsets make of silence is below it, no voice at a microphone is."""
STILL_S = 0.5
"""After so much of it the model remembers nothing of use."""
HELD_BACK_S = 0.12
"""So much the resampler holds back at most: 118 ms at 8 kHz, under 42 ms from 22 kHz on."""
KEPT_MS = 1000
"""Of silence, while a detector listens: what a turn's prefix may reach back to, and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Shapes: `pcm` is [512]. `end`: the stream's position after it. `still`: there is nothing to judge, it is no speech."""

    pcm: Pcm
    end: int
    still: bool

    @property
    def samples(self) -> Samples:
        return self.pcm.astype(np.float32) * np.float32(1 / 32768)


class AudioInputBuffer:
    """Units: positions count samples at 16 kHz since the session's first.

    Fifty microphones are mostly silent: long stillness, before any speech, is neither resampled nor judged, and is kept as zeros.
    Invariants: `kept` are the last samples, up to `position`; all of them after `_still_from`, where there is one, are zeros.
    """

    def __init__(self, rate_hz: int, rules: TurnRules | None) -> None:
        self.position = 0
        self._kept = bytearray()
        self._odd = b""
        self.vad = Vad()
        self._quiet_s = 0.0
        self._still_from: int | None = None
        self._judged = 0
        self.set_rate(rate_hz)
        self.detector: TurnDetector | None = None
        self.listen(rules)

    def set_rate(self, rate_hz: int) -> None:
        self.rate_hz = rate_hz
        self._came, self._came_at = 0, self.position
        self._resampler = None if rate_hz == RATE_HZ else soxr.ResampleStream(rate_hz, RATE_HZ, 1, "int16", quality="MQ")

    def listen(self, rules: TurnRules | None) -> None:
        """Without rules nobody but the client says when a turn ends."""
        if rules is None:
            self.detector = None
        elif self.detector is None or not self.detector.speaking:
            self.detector = TurnDetector(rules)
            self._judged = self.position
            self.vad.reset()
        else:
            self.detector.rules = rules

    @property
    def kept_ms(self) -> int:
        """Of what came: the resampler holds the end of it back."""
        return (len(self._kept) // 2 + self._owed) * 1000 // RATE_HZ

    @property
    def came(self) -> int:
        """Where all that came ends; `position` is behind it by what the resampler holds back."""
        return self._came_at + self._came * RATE_HZ // self.rate_hz

    @property
    def _owed(self) -> int:
        return max(0, self.came - self.position)

    def pieces(self, pcm: bytes) -> Iterator[bytes]:
        """What comes, in pieces short enough that others of the process have their turn in between.

        `pcm` is PCM16 little-endian mono at `rate_hz`; a sample cut in two is made whole by the next call.
        """
        pcm, self._odd = self._odd + pcm, b""
        if len(pcm) % 2:
            pcm, self._odd = pcm[:-1], pcm[-1:]
        step = 2 * max(1, int(self.rate_hz * SLICE_S))
        for start in range(0, len(pcm), step):
            yield pcm[start : start + step]

    def hear(self, piece: bytes) -> None:
        samples = np.frombuffer(piece, "<i2")
        self._came += len(samples)
        if self._is_still(samples):
            # What the resampler owes of the sound before is made up for in zeros.
            heard = bytes(2 * self._owed)
        elif self._resampler is None:
            heard = piece
        else:
            heard = self._resampler.resample_chunk(samples).astype("<i2", copy=False).tobytes()
        self._kept += heard
        self.position += len(heard) // 2

    def _is_still(self, samples: Pcm) -> bool:
        """Whether it has been so quiet for so long, before any speech, that nobody need look at it.

        Quiet enough before these samples, too: what the resampler holds back is thrown away then, and must be no sound.
        """
        quiet = int(np.maximum.reduce(samples)) < STILL and int(np.minimum.reduce(samples)) > -STILL
        before_s = self._quiet_s
        self._quiet_s = before_s + len(samples) / self.rate_hz if quiet else 0.0
        if self._quiet_s < STILL_S or before_s < HELD_BACK_S or self.detector is None or self.detector.speaking:
            self._still_from = None
        elif self._still_from is None:
            self._still_from = self.position
            self.vad.reset()
            if self._resampler is not None:
                self._resampler.clear()
        return self._still_from is not None

    def next_frame(self) -> Frame | None:
        """What the detector is to judge next, if it is all there."""
        if self.detector is None:
            self._judged = self.position
        if self.position - self._judged < FRAME_SAMPLES:
            return None
        still = self._still_from is not None and self._judged >= self._still_from
        start = 2 * (self._judged - self._first)
        pcm = np.frombuffer(bytes(self._kept[start : start + 2 * FRAME_SAMPLES]), "<i2")
        self._judged += FRAME_SAMPLES
        return Frame(pcm=pcm, end=self._judged, still=still)

    @property
    def is_behind(self) -> bool:
        """Whether a whole frame waits to be judged."""
        return self.detector is not None and self.position - self._judged >= FRAME_SAMPLES

    def judged(self, frame: Frame, probability: float) -> list[TurnEvent]:
        """What that says of turns; nothing if the frame was thrown away meanwhile."""
        if self.detector is None or frame.end != self._judged:
            return []
        events = self.detector.feed(probability, frame.end)
        if any(isinstance(event, Stopped) for event in events):
            self.vad.reset()
        return events

    def take(self, start: int, end: int) -> bytes:
        """PCM16 at 16 kHz from `start` to `end`, as far as it is kept. From now on only what comes after is."""
        taken = self.peek(start, end)
        del self._kept[: max(0, 2 * (end - self._first))]
        return taken

    def take_all(self) -> bytes:
        """Whatever came and is kept, to its last sample; a turn that has begun ends here."""
        taken = bytes(self._kept) + self._held_back()
        self.clear()
        return taken

    def _held_back(self) -> bytes:
        """The end that the resampler owes. It must be cleared then."""
        if self._resampler is None:
            return b""
        end = self._resampler.resample_chunk(np.empty(0, np.int16), last=True).astype("<i2", copy=False).tobytes()
        # A fraction of a sample is rounded as positions are.
        return end[: 2 * self._owed].ljust(2 * self._owed, b"\0")

    def peek(self, start: int, end: int) -> bytes:
        """The same, which stays."""
        return bytes(self._kept[max(0, 2 * (start - self._first)) : max(0, 2 * (end - self._first))])

    @property
    def _first(self) -> int:
        return self.position - len(self._kept) // 2

    def clear(self) -> None:
        """Nothing of what came belongs to what comes next; the time it took has passed."""
        self.position += self._owed
        self._odd = b""
        if self._resampler is not None:
            self._resampler.clear()
        self._kept.clear()
        self._judged = self.position
        if self.detector is not None:
            self.detector.cut(self.position)

    def forget_silence(self) -> None:
        """Of what no turn began in, only the end is kept."""
        if self.detector is None or self.detector.speaking:
            return
        keep = 2 * (RATE_HZ * KEPT_MS // 1000 + FRAME_SAMPLES)
        if len(self._kept) > keep:
            del self._kept[: len(self._kept) - keep]
