"""Synthesis of waveforms from speech features."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.lab.pocket.speech.analysis import NUM_FEATURES, NUM_MELS, analyse, contour_hz
from fleet.lab.pocket.speech.pulses import SAMPLES_PER_FRAME, pulse_samples, synthesise


def vowel(num_frames: int, noise_db: float = -20.0) -> NDArray[np.float16]:
    """Return features [T, 8, 51] of a steady vowel whose loudness falls with frequency."""
    features = np.zeros((num_frames, 8, NUM_FEATURES), np.float16)
    features[..., :NUM_MELS] = np.linspace(-4, -10, NUM_MELS)
    features[..., NUM_MELS:] = noise_db
    return features


def cycles(num_frames: int, count: int) -> NDArray[np.int16]:
    return np.full(num_frames, count, np.int16)


@pytest.mark.parametrize("count", [9, 12, 18])
def test_synthesised_pitch_follows_cycles(count: int) -> None:
    wave = synthesise(vowel(8), cycles(8, count))
    assert len(wave) == 8 * SAMPLES_PER_FRAME
    assert contour_hz(wave)[10:-10] == pytest.approx(12.5 * count, rel=0.01)


def test_analysis_of_synthesis_returns_the_features() -> None:
    """Analysis of the synthesis returns the features, within 1 nat, because WORLD smooths and
    grains of neighbouring pitch cycles overlap.
    """
    features = vowel(8)
    analysed = analyse(synthesise(features, cycles(8, 12))).features[16:48]
    assert analysed[:, 4:44].mean(0) == pytest.approx(features[0, 0, 4:44].astype(float), abs=1)


def test_equal_frames_give_equal_samples() -> None:
    wave = synthesise(vowel(6, noise_db=-3), cycles(6, 10)).reshape(6, -1)
    assert np.abs(wave).max() > 0.01
    assert wave[3] == pytest.approx(wave[2], abs=1e-5)


def test_frame_without_cycles_is_noise() -> None:
    voiced, unvoiced = (synthesise(vowel(4, noise_db=-20), cycles(4, count)) for count in (12, 0))
    assert 0 < np.abs(unvoiced).max() < 0.3 * np.abs(voiced).max()


def test_cycles_are_evenly_spaced_in_the_frame() -> None:
    assert pulse_samples(np.array([2, 0, 3], np.int16)) == [0, 960, 3840, 4480, 5120]
    edges = np.diff(pulse_samples(cycles(3, 7)))
    assert edges.max() - edges.min() <= 1


def test_synthesis_is_causal() -> None:
    """Synthesis is causal, except in the last 10 ms, where grains are interpolated between two
    analysis hops.
    """
    features = vowel(4)
    changed = features.copy()
    changed[2:] = 0
    one, other = synthesise(features, cycles(4, 11)), synthesise(changed, cycles(4, 11))
    safe = 2 * SAMPLES_PER_FRAME - 240
    assert np.array_equal(one[:safe], other[:safe])
    assert not np.allclose(one[safe:], other[safe:])
