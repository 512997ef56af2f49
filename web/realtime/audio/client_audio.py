"""Generated audio in the format of the client. Pure.

Each piece is computed from its position and the audio around it alone. A piece that is sent again,
also by another gateway, has the same bytes, and pieces join without a seam.
"""

from collections.abc import Callable

import numpy as np
import soxr
from numpy.typing import NDArray

from web.realtime.audio.formats import OUTPUT_RATE_HZ, AudioFormat

MARGIN = 360
"""Samples before and after a piece at 24 kHz (15 ms) on which its samples at 8 kHz depend. With
fewer, they differ by more than a hundredth of a unit of PCM16 from those of the whole audio.
"""


def lookahead(form: AudioFormat) -> int:
    """Return the number of samples after a piece that must be known before it is sent."""
    return MARGIN if form.stride > 1 else 0


def in_format(read: Callable[[int, int], bytes], first: int, last: int, form: AudioFormat) -> bytes:
    """Return the generated audio from sample `first` up to sample `last`, both at 24 kHz, in the
    client's format.

    `read`: function that returns the generated audio between two samples as PCM16, as far as the
    audio exists.
    Invariants: `first` is a multiple of the format's stride.
    """
    if form.stride == 1:
        return form.of_pcm(np.frombuffer(read(first, last), "<i2"))
    last += -last % form.stride
    before, after = max(0, first - MARGIN), last + MARGIN
    window = np.zeros(after - first + MARGIN, np.float32)
    known = np.frombuffer(read(before, after), "<i2")
    start = before - first + MARGIN
    window[start : start + len(known)] = known
    narrow = soxr.resample(window, OUTPUT_RATE_HZ, form.rate)
    margin = MARGIN // form.stride
    return form.of_pcm(_rounded(narrow[margin : len(narrow) - margin]))


def _rounded(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.clip(np.rint(samples), -32_768, 32_767).astype(np.int16)
