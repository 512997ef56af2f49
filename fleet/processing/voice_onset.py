"""The first voiced sample of a sound, and the silence before it: one definition for the gateway, the benchmark and the tests.

Pure: the result depends on the samples (and times) given, not on how they are cut into pieces. Knows no request.
"""

import math

import numpy as np
from numpy.typing import NDArray

FRAME_MS = 10
MIN_FRAMES = 3
"""A click of at most 10 ms touches two frames at most; the shortest vowel fills three."""
THRESHOLD_DBFS = -50.0
"""RMS of a frame. Dither lies near -90, a codec's silence below -60; the beginning of a spoken word rises above -45."""
SILENCE_DBFS = -60.0
BYTES_PER_SAMPLE = 2


class VoicedSearch:
    """Search for the first voiced sample of PCM16 mono that arrives in pieces of any size, whole samples each.

    It is the first sample of the first `min_frames` frames in a row whose RMS exceeds `threshold_dbfs`; frames count from the
    start of the sound. `floor`: no voiced sample lies before it; where `found`, it is the first one. Units: samples.
    """

    def __init__(self, rate_hz: int, *, min_frames: int = MIN_FRAMES, threshold_dbfs: float = THRESHOLD_DBFS) -> None:
        self.floor = 0
        self.found = False
        self._min_frames, self._threshold = min_frames, 32768 * 10 ** (threshold_dbfs / 20)
        self._frame_len = max(1, rate_hz * FRAME_MS // 1000)
        self._rest = b""
        self._next_frame = 0
        self._num_loud = 0

    def feed(self, pcm: bytes) -> None:
        if self.found:
            return
        frame_bytes = self._frame_len * BYTES_PER_SAMPLE
        pcm = self._rest + pcm
        whole = len(pcm) // frame_bytes * frame_bytes
        self._rest = pcm[whole:]
        self._judge(np.frombuffer(pcm[:whole], "<i2").reshape(-1, self._frame_len))

    def finish(self) -> None:
        """The sound is over: the last frame is judged by the samples that it has."""
        if self._rest and not self.found:
            self._judge(np.frombuffer(self._rest, "<i2").reshape(1, -1))
            self._rest = b""

    def _judge(self, frames: NDArray[np.int16]) -> None:
        for loud in np.sqrt((frames.astype(np.float32) ** 2).mean(axis=1)) > self._threshold:
            self._next_frame += 1
            self._num_loud = self._num_loud + 1 if loud else 0
            self.floor = (self._next_frame - self._num_loud) * self._frame_len
            if self._num_loud == self._min_frames:
                self.found = True
                return


class LeadingSilenceTrimmer:
    """Shortens the silence before the first loud frame to `max_ms`; None keeps all of it.

    Everything is withheld until a frame exceeds the threshold; nothing from that frame on is left out, whether voice or a click.
    A sound without any loud frame is shortened to its last `max_ms` if it is silent throughout, and kept whole if it is not: it
    may be a very quiet voice. `num_trimmed` counts the samples left out.
    """

    def __init__(self, rate_hz: int, max_ms: int | None) -> None:
        self.num_trimmed = 0
        self._rate_hz = rate_hz
        self._search = VoicedSearch(rate_hz, min_frames=1) if max_ms is not None else None
        self._max_len = rate_hz * (max_ms or 0) // 1000
        self._held = bytearray()

    def feed(self, pcm: bytes) -> bytes:
        """Take the next samples; return those that are to be sent now."""
        if self._search is None:
            return pcm
        self._search.feed(pcm)
        self._held += pcm
        return self._release(self._search.floor) if self._search.found else b""

    def finish(self) -> bytes:
        """Return what is to be sent at the end of the sound."""
        if self._search is None:
            return b""
        self._search.finish()
        return self._release(self._search.floor if self._search.found else self._silent_len())

    def _silent_len(self) -> int:
        """The length of what is held if all of it is silent, else 0."""
        quiet = VoicedSearch(self._rate_hz, min_frames=1, threshold_dbfs=SILENCE_DBFS)
        quiet.feed(bytes(self._held))
        quiet.finish()
        return 0 if quiet.found else len(self._held) // BYTES_PER_SAMPLE

    def _release(self, silent_len: int) -> bytes:
        """Return what is held, less its surplus of silence; whatever follows is not held."""
        self.num_trimmed = max(0, silent_len - self._max_len)
        held, self._held, self._search = bytes(self._held[self.num_trimmed * BYTES_PER_SAMPLE :]), bytearray(), None
        return held


class FirstVoicedClock:
    """The moment at which a listener who plays sound as it arrives hears the first voiced sample.

    `sample`: its place in the sound, and `at_s` that moment; None while there is none. Units: seconds of any one clock.
    """

    def __init__(self, rate_hz: int) -> None:
        self.sample: int | None = None
        self.at_s: float | None = None
        self._rate_hz = rate_hz
        self._search = VoicedSearch(rate_hz)
        self._num_samples = 0
        self._ends_s = -math.inf

    def add(self, pcm: bytes, now_s: float) -> None:
        """The next samples arrived."""
        first, begins_s = self._num_samples, max(now_s, self._ends_s)
        before_s, self._ends_s = self._ends_s, begins_s + len(pcm) / BYTES_PER_SAMPLE / self._rate_hz
        self._num_samples += len(pcm) // BYTES_PER_SAMPLE
        self._search.feed(pcm)
        if self.sample is None and self._search.found:
            self.sample = self._search.floor
            # It may lie in the piece before, of which it needed this one to be decided.
            from_s = begins_s if self.sample >= first else before_s
            self.at_s = from_s + (self.sample - first) / self._rate_hz
