"""A long recording on disk: mono PCM16 in a temporary file without a name, and the places at which
it can be cut.
"""

import tempfile
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleet.processing.base import Samples

LONGEST_PIECE_S, SHORTEST_SHARE = 28.0, 0.5
"""Most seconds of a piece, which with 2 s of silence fill a window of 30 s; and least length of a
piece before the last, as a share of the longest.
"""
PAUSE_S, HOP_S = 0.3, 0.02
"""Length of the pause in which a recording is cut, and distance between the places examined."""
QUIET_FACTOR = 2.0
"""Of pauses whose power is within this factor of the quietest, the last one is taken."""
BYTES_PER_SAMPLE = 2
Pcm = NDArray[np.int16]


class SpooledAudio:
    """Mono PCM16 samples at `rate_hz` in a temporary file, which is deleted by `close` or when the
    process ends. Thread-safe.
    """

    def __init__(self, rate_hz: int) -> None:
        self.rate_hz = rate_hz
        self.num_samples = 0
        self._file = tempfile.TemporaryFile()
        self._lock = threading.Lock()

    def append(self, pcm: bytes) -> None:
        with self._lock:
            self._file.seek(0, 2)
            self._file.write(pcm)
            self.num_samples += len(pcm) // BYTES_PER_SAMPLE

    def read(self, start: int, end: int) -> Pcm:
        """Return the samples from `start` to `end`, or to the end of the recording."""
        with self._lock:
            self._file.seek(start * BYTES_PER_SAMPLE)
            return np.frombuffer(self._file.read((end - start) * BYTES_PER_SAMPLE), "<i2")

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def pieces(self, longest_s: float = LONGEST_PIECE_S) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each piece in samples, in order; the recording is read as pieces
        are taken. Each piece before the last ends in a pause; all together are the recording.
        """
        start, longest = 0, int(longest_s * self.rate_hz)
        while start < self.num_samples:
            end = min(start + longest, self.num_samples)
            if end < self.num_samples:
                first = start + int(SHORTEST_SHARE * longest)
                end = first + last_pause(self.read(first, end), self.rate_hz)
            yield start, end
            start = end


def pcm16(samples: Samples) -> bytes:
    """Return samples as PCM16; those beyond -1..1 are clipped."""
    return np.rint(samples.clip(-1, 32_767 / 32_768) * 32_768).astype("<i2").tobytes()


def last_pause(samples: Pcm, rate_hz: int) -> int:
    """Return the sample position of the middle of the last pause that is about as quiet as the
    quietest one; see `QUIET_FACTOR`.
    """
    hop, num_hops = round(HOP_S * rate_hz), round(PAUSE_S / HOP_S)
    whole = samples[: len(samples) // hop * hop].astype(np.float64).reshape(-1, hop)
    power = np.convolve(np.square(whole).mean(axis=1), np.full(num_hops, 1 / num_hops), "valid")
    quiet = np.flatnonzero(power <= max(QUIET_FACTOR * float(power.min()), 1.0))
    return (int(quiet[-1]) + num_hops // 2) * hop
