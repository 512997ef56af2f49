"""The first voiced sample of a sound, and the silence before it: one definition for the gateway, the benchmark and the tests.

Pure: the result depends on the samples (and times) given, not on how they are cut into pieces. Knows no request.
"""

import math

import numpy as np

FRAME_MS = 10
MIN_FRAMES = 3
"""A click of less than 20 ms touches at most two frames; the shortest vowel fills three."""
THRESHOLD_DBFS = -50.0
"""RMS of a frame. Dither lies near -90, a codec's silence below -60; the beginning of a spoken word rises above -45."""
BYTES_PER_SAMPLE = 2
_THRESHOLD = 32768 * 10 ** (THRESHOLD_DBFS / 20)


class VoicedSearch:
    """Search for the first voiced sample of PCM16 mono that arrives in pieces of any size, whole samples each.

    It is the first sample of the first `MIN_FRAMES` frames in a row that exceed the threshold; frames count from the start of
    the sound. `floor`: no voiced sample lies before it; where `found`, it is the first one. Units: samples.
    """

    def __init__(self, rate_hz: int) -> None:
        self.floor = 0
        self.found = False
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
        frames = np.frombuffer(pcm[:whole], "<i2").reshape(-1, self._frame_len).astype(np.float32)
        for loud in np.sqrt((frames**2).mean(axis=1)) > _THRESHOLD:
            self._next_frame += 1
            self._num_loud = self._num_loud + 1 if loud else 0
            self.floor = (self._next_frame - self._num_loud) * self._frame_len
            if self._num_loud == MIN_FRAMES:
                self.found = True
                return


class LeadingSilence:
    """Shortens the silence before the first voiced sample to `max_ms`; None keeps all of it.

    Silence is withheld until voice follows; voice itself for less than `MIN_FRAMES` + 1 frames. A sound without any voice is
    shortened to its last `max_ms`. `num_trimmed` counts the samples left out so far.
    """

    def __init__(self, rate_hz: int, max_ms: int | None) -> None:
        self.num_trimmed = 0
        self._search = VoicedSearch(rate_hz) if max_ms is not None else None
        self._max_len = rate_hz * (max_ms or 0) // 1000
        self._held = bytearray()

    def feed(self, pcm: bytes) -> bytes:
        """Take the next samples; return those that are to be sent now."""
        if self._search is None:
            return pcm
        self._search.feed(pcm)
        self._held += pcm
        self._trim(self._search.floor)
        return self._release() if self._search.found else b""

    def finish(self) -> bytes:
        """Return what is to be sent at the end of the sound."""
        self._trim(self.num_trimmed + len(self._held) // BYTES_PER_SAMPLE)
        return self._release()

    def _trim(self, voiced: int) -> None:
        num_surplus = max(0, voiced - self._max_len - self.num_trimmed)
        del self._held[: num_surplus * BYTES_PER_SAMPLE]
        self.num_trimmed += num_surplus

    def _release(self) -> bytes:
        """Return all that is held; whatever follows is not held."""
        held, self._held, self._search = bytes(self._held), bytearray(), None
        return held


class FirstVoiced:
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

    def came(self, pcm: bytes, now_s: float) -> None:
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
