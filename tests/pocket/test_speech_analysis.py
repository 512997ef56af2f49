"""WORLD analysis of synthetic signals with known pitch and loudness."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.lab.pocket.speech.analysis import (
    HOP_SAMPLES,
    LOUDNESS_FLOOR,
    NUM_FEATURES,
    NUM_MELS,
    analyse,
    contour,
    mel_centres_hz,
    mel_filters,
    silence,
)
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ


def buzz(pitch_hz: float, seconds: float = 0.6) -> NDArray[np.float32]:
    """Return a tone of all harmonics below 11 kHz, with amplitudes inverse to their numbers."""
    phase = 2 * np.pi * pitch_hz * np.arange(int(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    numbers = np.arange(1, int(11_000 / pitch_hz))
    return (0.2 / numbers @ np.sin(numbers[:, None] * phase)).astype(np.float32)


@pytest.mark.parametrize("pitch_hz", [110.0, 200.0])
def test_pitch_of_buzz_is_found(pitch_hz: float) -> None:
    track = analyse(buzz(pitch_hz))
    inner = slice(5, -5)
    assert track.is_voiced[inner].all()
    assert track.pitch_hz[inner] == pytest.approx(pitch_hz, rel=0.01)


def test_buzz_has_lower_aperiodicity_than_noise() -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(14_400).astype(np.float32)
    assert analyse(buzz(120)).features[10:-10, NUM_MELS].mean() < -10
    assert analyse(noise).features[10:-10, NUM_MELS:].mean() > -3


def test_double_amplitude_is_four_times_the_power() -> None:
    quiet, loud = (
        analyse(gain * buzz(120)).features[10:-10, :20] for gain in (np.float32(1), np.float32(2))
    )
    assert loud - quiet == pytest.approx(np.log(4), abs=0.01)


def test_loudness_is_not_below_silence() -> None:
    track = analyse(np.zeros(4800, np.float32))
    assert track.features.shape == (4800 // HOP_SAMPLES + 1, NUM_FEATURES)
    assert np.array_equal(track.features, silence(len(track.features)))
    assert not track.is_voiced.any() and np.isfinite(track.pitch_hz).all()
    assert (track.features[:, :NUM_MELS] == LOUDNESS_FLOOR).all()


def test_contour_bridges_unvoiced_hops_and_octave_jumps() -> None:
    pitch = np.full(40, 100.0)
    pitch[10:14] = 200
    pitch[20:30] = 0
    assert contour(pitch, pitch > 0) == pytest.approx(100)


def test_mel_filter_peaks_at_its_centre() -> None:
    filters = mel_filters()
    assert filters.shape == (NUM_MELS, 513)
    assert filters.sum(1) == pytest.approx(1)
    bins_hz = np.linspace(0, SAMPLE_RATE_HZ / 2, 513)
    assert filters @ bins_hz == pytest.approx(mel_centres_hz(), abs=24)
