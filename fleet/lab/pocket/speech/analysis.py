"""Analysis of speech with the WORLD vocoder: loudness and noise share of frequency bands, and
pitch, every 10 ms (a hop).

Source: WORLD (Morise et al. 2016) as wrapped by pyworld: dio, cheaptrick, d4c.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ

HOP_S: Final = 0.01
HOP_SAMPLES: Final = 240
FFT_SIZE: Final = 1024
NUM_MELS: Final = 48
NUM_BANDS: Final = 3
"""Number of aperiodicity bands: WORLD's at 3, 6 and 9 kHz."""
NUM_FEATURES: Final = NUM_MELS + NUM_BANDS
LOUDNESS_FLOOR: Final = -15.0
PITCH_RANGE_HZ: Final = (75.0, 350.0)
_MEL_RANGE_HZ = (40.0, 11_800.0)
_MEDIAN_HOPS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Features and pitch of an utterance, every 10 ms.

    Shapes: features [S, 51] of float32, first 48 mel bands, then 3 aperiodicities; pitch_hz and
    is_voiced [S].
    Units: bands in ln of power, not below LOUDNESS_FLOOR; aperiodicities in dB, 0 is all noise;
    pitch in Hz, interpolated where unvoiced.
    """

    features: NDArray[np.float32]
    pitch_hz: NDArray[np.float32]
    is_voiced: NDArray[np.bool_]


def silence(num_hops: int) -> NDArray[np.float32]:
    """Return the features [num_hops, 51] of silence."""
    return np.tile(
        np.array([LOUDNESS_FLOOR] * NUM_MELS + [0.0] * NUM_BANDS, np.float32), (num_hops, 1)
    )


def analyse(samples: NDArray[np.float32]) -> Track:
    """Compute the features and pitch of mono speech at 24 kHz. Aperiodicities are measured every
    20 ms and each is used for two hops, which halves the time of their computation.
    """
    world, wave = _world(), samples.astype(np.float64)
    pitch, times = _pitch(wave)
    power = world.cheaptrick(wave, pitch, times, SAMPLE_RATE_HZ, fft_size=FFT_SIZE)
    noise = world.d4c(wave, pitch[::2].copy(), times[::2].copy(), SAMPLE_RATE_HZ, fft_size=FFT_SIZE)
    bands_db = np.repeat(world.code_aperiodicity(noise, SAMPLE_RATE_HZ), 2, axis=0)[: len(pitch)]
    loudness = np.maximum(np.log(power @ mel_filters().T + 1e-9), LOUDNESS_FLOOR)
    is_voiced = pitch > 0
    bands_db[~is_voiced] = 0.0
    return Track(
        features=np.concatenate([loudness, np.minimum(bands_db, 0)], axis=1).astype(np.float32),
        pitch_hz=contour(pitch, is_voiced),
        is_voiced=is_voiced,
    )


def _pitch(wave: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the pitch in Hz, 0 where unvoiced, and the time of each hop. Shapes: [S]."""
    low, high = PITCH_RANGE_HZ
    # `speed=2`: dio on every second sample is 3 times as fast; 0.2 % of hops differ by half a
    # semitone.
    return _world().dio(
        wave, SAMPLE_RATE_HZ, f0_floor=low, f0_ceil=high, frame_period=1e3 * HOP_S, speed=2
    )


def contour_hz(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the pitch [S] of speech every 10 ms, interpolated where unvoiced."""
    pitch, _ = _pitch(samples.astype(np.float64))
    return contour(pitch, pitch > 0)


def contour(pitch_hz: NDArray[np.float64], is_voiced: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Interpolate the pitch through unvoiced hops, and remove octave jumps of a few hops by a
    median filter.
    """
    if not is_voiced.any():
        return np.full(len(pitch_hz), PITCH_RANGE_HZ[0], np.float32)
    hops = np.arange(len(pitch_hz))
    interpolated = np.interp(hops, hops[is_voiced], pitch_hz[is_voiced])
    padded = np.pad(interpolated, _MEDIAN_HOPS // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN_HOPS), axis=1).astype(
        np.float32
    )


@cache
def mel_centres_hz() -> NDArray[np.float64]:
    """Return the centre frequencies [48] of the mel bands."""
    return mel_edges_hz(_MEL_RANGE_HZ, NUM_MELS)[1:-1]


@cache
def mel_filters() -> NDArray[np.float64]:
    """Return triangular mel filters [48, 513], each with sum 1. A band narrower than a bin is the
    nearest bin.
    """
    bins, edges = (
        np.linspace(0, SAMPLE_RATE_HZ / 2, FFT_SIZE // 2 + 1),
        mel_edges_hz(_MEL_RANGE_HZ, NUM_MELS),
    )
    filters = triangles(bins, edges)
    for band in np.flatnonzero(filters.sum(1) == 0):
        filters[band, np.abs(bins - edges[band + 1]).argmin()] = 1
    return filters / filters.sum(1, keepdims=True)


def mel_edges_hz(range_hz: tuple[float, float], num_bands: int) -> NDArray[np.float64]:
    """Return the band edges and centres of `num_bands` bands in Hz, evenly spaced in mels: [bands +
    2], from the lower edge of the first band to the upper edge of the last.
    """
    low, high = (2595 * np.log10(1 + hz / 700) for hz in range_hz)
    return 700 * (10 ** (np.linspace(low, high, num_bands + 2) / 2595) - 1)


def triangles(bins_hz: NDArray[np.float64], edges_hz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return triangular filters [bands, bins] with a height of 1 at each band's centre."""
    low, centre, high = edges_hz[:-2, None], edges_hz[1:-1, None], edges_hz[2:, None]
    return np.maximum(
        0, np.minimum((bins_hz - low) / (centre - low), (high - bins_hz) / (high - centre))
    )


@cache
def _world() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
        import pyworld  # only building data sets needs it; it warns about its own build tool

    return pyworld
