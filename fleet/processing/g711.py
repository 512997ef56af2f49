"""G.711: telephone speech with one byte a sample, by two laws. Pure; knows no file and no rate.

Source: ITU-T G.711, tables 1a to 2b; rounding as in Sun's `g711.c` and Python's `audioop`.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pcm = NDArray[np.int16]
Law = Literal["mu", "a"]
RATE_HZ = 8_000
_BIAS, _MU_MAX = 33, 8_158
"""µ-law works on 14 bits: magnitudes are clipped to `_MU_MAX`, and the bias puts the smallest
segment's end at a power of two.
"""
_EVERY_SAMPLE = np.arange(-32_768, 32_768, dtype=np.int32)


def encode(pcm: Pcm, law: Law) -> bytes:
    """Return PCM16 samples as G.711, one byte a sample."""
    return _ENCODED[law][pcm.view(np.uint16)].tobytes()


def decode(audio: bytes, law: Law) -> Pcm:
    """Return G.711 as PCM16 samples, one for each byte."""
    return _DECODED[law][np.frombuffer(audio, np.uint8)]


def _mu_bytes(samples: NDArray[np.int32]) -> NDArray[np.uint8]:
    short = samples >> 2
    size = np.minimum(np.abs(short), _MU_MAX) + _BIAS
    segment = _num_bits(size) - 6
    code = segment << 4 | (size >> (segment + 1)) & 0xF
    return (code ^ np.where(short < 0, 0x7F, 0xFF)).astype(np.uint8)


def _a_bytes(samples: NDArray[np.int32]) -> NDArray[np.uint8]:
    short = samples >> 3
    size = np.where(short < 0, ~short, short)
    segment = np.maximum(_num_bits(size) - 5, 0)
    code = segment << 4 | (size >> np.maximum(segment, 1)) & 0xF
    return (code ^ np.where(short < 0, 0x55, 0xD5)).astype(np.uint8)


def _num_bits(size: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.frexp(size)[1].astype(np.int32)


def _mu_samples(codes: NDArray[np.int32]) -> Pcm:
    flipped = ~codes & 0xFF
    size = (((flipped & 0xF) << 3) + 4 * _BIAS << (flipped >> 4 & 7)) - 4 * _BIAS
    return np.where(flipped & 0x80, -size, size).astype(np.int16)


def _a_samples(codes: NDArray[np.int32]) -> Pcm:
    flipped = codes ^ 0x55
    segment = flipped >> 4 & 7
    step = ((flipped & 0xF) << 4) + np.where(segment, 0x108, 8)
    size = step << np.maximum(segment - 1, 0)
    return np.where(flipped & 0x80, size, -size).astype(np.int16)


def _by_unsigned(table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a table, which has the order of `_EVERY_SAMPLE`, reordered so that a sample read as an
    unsigned 16-bit number is its index.
    """
    return np.roll(table, 32_768)


_CODES = np.arange(256, dtype=np.int32)
_ENCODED: dict[Law, NDArray[np.uint8]] = {
    "mu": _by_unsigned(_mu_bytes(_EVERY_SAMPLE)),
    "a": _by_unsigned(_a_bytes(_EVERY_SAMPLE)),
}
_DECODED: dict[Law, Pcm] = {"mu": _mu_samples(_CODES), "a": _a_samples(_CODES)}
