"""The first voiced sample of audio, and the silence before it: one definition for gateway,
benchmark and tests.

Pure: the result depends on the samples and their times, not on how they are cut into pieces. Knows
no request.
"""

import math

import numpy as np
from numpy.typing import NDArray

FRAME_MS = 10
MIN_FRAMES = 3
"""Number of consecutive loud frames that count as voice. A click of at most 10 ms touches at most
two frames; the shortest vowel fills three.
"""
THRESHOLD_DBFS = -50.0
"""RMS above which a frame is loud. Dither lies near -90, a codec's silence below -60; the beginning
of a spoken word rises above -45.
"""
SILENCE_DBFS = -60.0
BYTES_PER_SAMPLE = 2


class VoicedSearch:
    """Search for the first voiced sample of a PCM16 mono stream, which is fed in pieces of whole
    samples.

    The first voiced sample is the first sample of the first `min_frames` consecutive 10 ms frames
    whose RMS exceeds `threshold_dbfs`; frames count from the start of the audio. `found`: True once
    the sample is found. `floor`: position in samples before which there is no voiced sample; once
    `found`, the position of the first voiced sample.
    """

    def __init__(
        self, rate_hz: int, *, min_frames: int = MIN_FRAMES, threshold_dbfs: float = THRESHOLD_DBFS
    ) -> None:
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
        self._scan(np.frombuffer(pcm[:whole], "<i2").reshape(-1, self._frame_len))

    def finish(self) -> None:
        """Evaluate the last, incomplete frame at the end of the audio."""
        if self._rest and not self.found:
            self._scan(np.frombuffer(self._rest, "<i2").reshape(1, -1))
            self._rest = b""

    def _scan(self, frames: NDArray[np.int16]) -> None:
        for loud in np.sqrt((frames.astype(np.float32) ** 2).mean(axis=1)) > self._threshold:
            self._next_frame += 1
            self._num_loud = self._num_loud + 1 if loud else 0
            self.floor = (self._next_frame - self._num_loud) * self._frame_len
            if self._num_loud == self._min_frames:
                self.found = True
                return


class LeadingSilenceTrimmer:
    """Filter of a PCM16 mono stream that shortens the silence before the first loud frame to
    `max_ms`; None disables it.

    Audio is withheld until a frame exceeds the threshold, and passes unchanged from then on, be it
    voice or a click. A stream that ends without a loud frame is shortened to its last `max_ms` if
    it is entirely silent, and otherwise returned whole, since it may be a very quiet voice.
    `num_trimmed`: number of removed samples.
    """

    def __init__(self, rate_hz: int, max_ms: int | None) -> None:
        self.num_trimmed = 0
        self._rate_hz = rate_hz
        self._search = VoicedSearch(rate_hz, min_frames=1) if max_ms is not None else None
        self._max_len = rate_hz * (max_ms or 0) // 1000
        self._held = bytearray()

    def feed(self, pcm: bytes) -> bytes:
        """Add the next samples of the stream; return the samples to send now."""
        if self._search is None:
            return pcm
        self._search.feed(pcm)
        self._held += pcm
        return self._release(self._search.floor) if self._search.found else b""

    def finish(self) -> bytes:
        """End the stream; return the remaining samples to send."""
        if self._search is None:
            return b""
        self._search.finish()
        return self._release(self._search.floor if self._search.found else self._silent_len())

    def _silent_len(self) -> int:
        """Return the number of held samples if all are silent, else 0."""
        quiet = VoicedSearch(self._rate_hz, min_frames=1, threshold_dbfs=SILENCE_DBFS)
        quiet.feed(bytes(self._held))
        quiet.finish()
        return 0 if quiet.found else len(self._held) // BYTES_PER_SAMPLE

    def _release(self, silent_len: int) -> bytes:
        """Return the withheld samples without the excess of silence, and withhold no more.
        `silent_len`: number of silent samples at their beginning.
        """
        self.num_trimmed = max(0, silent_len - self._max_len)
        held, self._held, self._search = (
            bytes(self._held[self.num_trimmed * BYTES_PER_SAMPLE :]),
            bytearray(),
            None,
        )
        return held


class FirstVoicedClock:
    """Computation of the time at which a client that plays audio on arrival plays the first voiced
    sample.

    `sample`: position of the first voiced sample in the audio; `at_s`: time at which it is played,
    on the clock of `add`. Until the sample is found, both are None.
    """

    def __init__(self, rate_hz: int) -> None:
        self.sample: int | None = None
        self.at_s: float | None = None
        self._rate_hz = rate_hz
        self._search = VoicedSearch(rate_hz)
        self._num_samples = 0
        self._ends_s = -math.inf

    def add(self, pcm: bytes, now_s: float) -> None:
        """Add samples that arrived at `now_s`."""
        first, begins_s = self._num_samples, max(now_s, self._ends_s)
        before_s, self._ends_s = (
            self._ends_s,
            begins_s + len(pcm) / BYTES_PER_SAMPLE / self._rate_hz,
        )
        self._num_samples += len(pcm) // BYTES_PER_SAMPLE
        self._search.feed(pcm)
        if self.sample is None and self._search.found:
            self.sample = self._search.floor
            # The sample may be in the previous piece: the search needs the frames that follow.
            from_s = begins_s if self.sample >= first else before_s
            self.at_s = from_s + (self.sample - first) / self._rate_hz
