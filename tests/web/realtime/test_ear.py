"""What comes is kept to the sample: the resampler swallows no end of it, and none of it opens what comes after."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from web.realtime.ear import Ear
from web.realtime.turns import RATE_HZ, TurnRules

RATES = [8_000, 11_025, 16_000, 24_000, 44_100, 48_000]
NEAR = RATE_HZ // 500
"""An edge is smeared by less."""


def tone(rate_hz: int, ms: int) -> bytes:
    return (10_000 * np.sin(2 * np.pi * 400 * np.arange(rate_hz * ms // 1000) / rate_hz)).astype("<i2").tobytes()


def quiet(rate_hz: int, ms: int) -> bytes:
    return bytes(2 * (rate_hz * ms // 1000))


def hear(ear: Ear, pcm: bytes, step: int | None = None) -> None:
    for piece in _cut(ear, pcm, step):
        ear.hear(piece)


def _cut(ear: Ear, pcm: bytes, step: int | None) -> Iterator[bytes]:
    for start in range(0, len(pcm), step or len(pcm)):
        yield from ear.pieces(pcm[start : start + (step or len(pcm))])


def loud(pcm: bytes) -> NDArray[np.intp]:
    """The samples that nobody would take for the edge of something."""
    return np.flatnonzero(np.abs(np.frombuffer(pcm, "<i2").astype(int)) > 3_000)


@pytest.mark.parametrize("rate_hz", RATES)
def test_the_end_of_a_sound_is_kept_though_all_that_comes_next_is_still(rate_hz: int) -> None:
    """Recordings come in pieces as long as stillness has to be; what is too short to be speech yet may become some."""
    ear = Ear(rate_hz, TurnRules())
    pcm = quiet(rate_hz, 420) + tone(rate_hz, 80) + quiet(rate_hz, 1_500)
    hear(ear, pcm)
    at = loud(ear.peek(0, ear.position))
    assert abs(int(at[0]) - RATE_HZ * 420 // 1000) < NEAR and abs(int(at[-1]) - RATE_HZ // 2) < NEAR
    assert ear.position == len(pcm) // 2 * RATE_HZ // rate_hz, "and the stillness after it was none to resample"
