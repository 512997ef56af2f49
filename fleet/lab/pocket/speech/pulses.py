"""Synthesis of a waveform from features and glottal cycles: one grain per glottal cycle, evenly
spaced in the frame, and fixed noise.

Synthesis is deterministic, so the waveform is a function of the codes, and a decoder can be trained
on it sample by sample.
Source: minimum phase from the real cepstrum, and the mix of pulse and noise by aperiodicity, as in
WORLD's synthesis.
"""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.speech.analysis import (
    FFT_SIZE,
    HOP_SAMPLES,
    NUM_BANDS,
    NUM_MELS,
    mel_centres_hz,
)
from fleet.lab.pocket.speech.wordlock import HOPS_PER_FRAME
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ

SAMPLES_PER_FRAME: Final = HOPS_PER_FRAME * HOP_SAMPLES
_SEED = 7
_NUM_BINS = FFT_SIZE // 2 + 1
_DEEPEST_DB = -60.0

Grains = NDArray[np.float64]


def synthesise(features: NDArray[np.float16], cycles: NDArray[np.int16]) -> NDArray[np.float32]:
    """Return the samples [T * 1920] in -1..1 for features [T, 8, 51] and glottal cycles [T]."""
    voiced, noise = _grains(features.reshape(-1, features.shape[-1]).astype(np.float64))
    wave = np.zeros(len(voiced) * HOP_SAMPLES + FFT_SIZE)
    for hop, grain in enumerate(noise):
        wave[hop * HOP_SAMPLES : hop * HOP_SAMPLES + FFT_SIZE] += grain
    for at in pulse_samples(cycles):
        period = SAMPLES_PER_FRAME / cycles[at // SAMPLES_PER_FRAME]
        wave[at : at + FFT_SIZE] += np.sqrt(period) * _between(voiced, at / HOP_SAMPLES)
    return np.clip(wave[:-FFT_SIZE], -1, 1).astype(np.float32)


def pulse_samples(cycles: NDArray[np.int16]) -> list[int]:
    """Return the index of the first sample of each glottal cycle. The first cycle of a frame starts
    at the frame's first sample.
    """
    return [
        frame * SAMPLES_PER_FRAME + round(index * SAMPLES_PER_FRAME / count)
        for frame, count in enumerate(cycles.tolist())
        for index in range(count)
    ]


def _between(grains: Grains, hop: float) -> NDArray[np.float64]:
    before = int(hop)
    after = min(before + 1, len(grains) - 1)
    return grains[before] + (hop - before) * (grains[after] - grains[before])


def _grains(features: NDArray[np.float64]) -> tuple[Grains, Grains]:
    """Return the responses [S, 1024] of each hop to a pulse and to noise, weighted by the share of
    noise in every frequency bin.
    """
    log_power = features[:, :NUM_MELS] @ _from_mels()
    knots_db = np.concatenate(
        [np.full((len(features), 1), _DEEPEST_DB), np.minimum(features[:, NUM_MELS:], 0)], axis=1
    )
    share = 10 ** (knots_db @ _from_bands() / 20)
    cepstrum = np.fft.irfft(log_power / 2, FFT_SIZE)
    cepstrum[:, 1 : FFT_SIZE // 2] *= 2
    cepstrum[:, FFT_SIZE // 2 + 1 :] = 0
    response = np.exp(np.fft.rfft(cepstrum, FFT_SIZE))
    excitation = _noise()[np.arange(len(features)) % HOPS_PER_FRAME]
    voiced = np.fft.irfft(response * np.sqrt(1 - share**2), FFT_SIZE)
    return voiced, np.fft.irfft(response * share * excitation, FFT_SIZE)


@cache
def _from_mels() -> NDArray[np.float64]:
    """Return the matrix [48, 513] that interpolates linearly from mel bands to frequency bins."""
    bins = np.linspace(0, SAMPLE_RATE_HZ / 2, _NUM_BINS)
    return np.stack([np.interp(bins, mel_centres_hz(), row) for row in np.eye(NUM_MELS)])


@cache
def _from_bands() -> NDArray[np.float64]:
    """Return the matrix [4, 513] that interpolates aperiodicity in dB to frequency bins, from no
    noise at 0 Hz through the bands to all noise at 12 kHz, as in WORLD.
    """
    bins = np.linspace(0, SAMPLE_RATE_HZ / 2, _NUM_BINS)
    knots = np.linspace(0, SAMPLE_RATE_HZ / 2, NUM_BANDS + 2)
    return np.stack([np.interp(bins, knots, row) for row in np.eye(NUM_BANDS + 2)[:-1]])


@cache
def _noise() -> NDArray[np.complex128]:
    """Return the spectra [8, 513] of a fixed frame of noise, which every frame uses."""
    noise = np.random.default_rng(_SEED).standard_normal((HOPS_PER_FRAME, HOP_SAMPLES))
    noise /= np.sqrt((noise**2).mean(1, keepdims=True))
    return np.fft.rfft(noise, FFT_SIZE)
