"""Audio without speech: noise, mains hum, clicks and chords. Levels are RMS in dBFS."""

import io

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray

Wave = NDArray[np.float32]


def at_level(wave: NDArray[np.float64] | Wave, dbfs: float) -> Wave:
    """Scale a wave to an RMS level in dBFS, and return it clipped and rounded as PCM16."""
    rms = float(np.sqrt(np.mean(np.square(wave, dtype=np.float64))))
    return as_pcm16(wave * (10 ** (dbfs / 20) / rms))


def as_pcm16(wave: NDArray[np.float64] | Wave) -> Wave:
    return (np.clip(np.round(wave * 32_768), -32_768, 32_767) / 32_768).astype(np.float32)


def noise(chance: Generator, rate_hz: int, seconds: float, dbfs: float, slope: float = 0.0) -> Wave:
    """Return noise whose amplitudes fall as 1 / f**slope: 0 is white, 0.5 pink, 1 brown."""
    spectrum = np.fft.rfft(chance.normal(size=round(rate_hz * seconds)))
    bins = np.maximum(1, np.arange(len(spectrum)))
    return at_level(np.fft.irfft(spectrum / bins**slope, round(rate_hz * seconds)), dbfs)


def hum(chance: Generator, rate_hz: int, seconds: float, dbfs: float, mains_hz: float = 50) -> Wave:
    """Return mains hum with up to six harmonics of any strength and phase, over a little noise."""
    at_s = np.arange(round(rate_hz * seconds)) / rate_hz
    wave = np.sin(2 * np.pi * mains_hz * at_s)
    for harmonic in range(2, 2 + chance.integers(0, 7)):
        phase = chance.uniform(0, 2 * np.pi)
        wave += chance.uniform() * np.sin(2 * np.pi * mains_hz * harmonic * at_s + phase)
    return as_pcm16(at_level(wave, dbfs) + noise(chance, rate_hz, seconds, -75))


def clicks(chance: Generator, rate_hz: int, seconds: float, per_second: float) -> Wave:
    """Return steps of up to 25 ms, at random times and of random heights."""
    wave = np.zeros(round(rate_hz * seconds))
    longest = rate_hz // 40
    for start in chance.integers(0, len(wave) - longest, round(per_second * seconds)):
        wave[start : start + chance.integers(1, longest)] += chance.uniform(-1, 1)
    return as_pcm16(wave)


def taps(chance: Generator, rate_hz: int, seconds: float, per_second: float) -> Wave:
    """Return noise bursts that decay within 25 ms, like keystrokes and knocks."""
    wave = np.zeros(round(rate_hz * seconds))
    length = rate_hz // 10
    for start in chance.integers(0, len(wave) - length, round(per_second * seconds)):
        decay = np.exp(-np.arange(length) / (rate_hz * chance.uniform(0.003, 0.025)))
        wave[start : start + length] += (
            chance.uniform(0.05, 0.5) * chance.normal(size=length) * decay
        )
    return as_pcm16(wave)


def chords(chance: Generator, rate_hz: int, seconds: float, dbfs: float) -> Wave:
    """Return struck chords of three or four notes, each with up to seven partials, at a rate of one
    to five chords a second.
    """
    wave, start = np.zeros(round(rate_hz * seconds)), 0
    while start < len(wave):
        length = min(round(chance.uniform(0.2, 1.2) * rate_hz), len(wave) - start)
        at_s = np.arange(length) / rate_hz
        envelope = np.exp(-at_s * chance.uniform(0.5, 4)) * np.minimum(1, at_s / 0.01)
        root_hz = 110 * 2 ** (chance.integers(0, 24) / 12)
        for semitones in ((0, 4, 7), (0, 3, 7), (0, 4, 7, 11), (0, 5, 9))[chance.integers(4)]:
            for partial in range(1, chance.integers(2, 9)):
                note_hz = root_hz * 2 ** (semitones / 12) * partial
                tone = np.sin(2 * np.pi * note_hz * at_s)
                wave[start : start + length] += envelope * tone / partial ** chance.uniform(0.8, 2)
        start += length
    return at_level(wave, dbfs)


def wav(wave: Wave, rate_hz: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate_hz, format="WAV", subtype="PCM_16")
    return file.getvalue()


def pcm16(wave: Wave) -> bytes:
    return (wave * 32_768).clip(-32_768, 32_767).astype("<i2").tobytes()
