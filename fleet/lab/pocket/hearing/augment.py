"""Augmentation of clean recordings: speed, silence, rooms, microphones, telephone lines, noise and
babble.

All randomness comes from the `rng` argument.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.lab.pocket.hearing.recordings import SAMPLE_RATE_HZ
from fleet.processing import g711

Samples = NDArray[np.float32]
FASTEST: Final = 1.14
"""Largest factor of the speed change, up or down. Resampling changes the pitch too, as a shorter
vocal tract would.
"""
MAX_SILENCE_S: Final = 0.6
REVERB_S: Final = (0.08, 0.5)
"""Range of a room's reverberation time: the time in which the echo falls by 60 dB."""
NOISE_DB: Final = (5.0, 40.0)
LOUDNESS_DB: Final = (-26.0, 2.0)
TELEPHONE_SHARE: Final = 0.2
"""Share of clips that arrive over a telephone line."""
LINE_SHARE: Final = 0.5
LINE_HZ: Final = ((150.0, 400.0), (3000.0, 4000.0))
"""Ranges of the lower and the upper cutoff frequency of telephone lines that are narrower than
G.711 requires; `LINE_SHARE` is the share of such lines.
"""
COLOUR_DB, COLOUR_POINTS = 6.0, 6
_NOISE_SLOPES: Final = {"white": 0.0, "pink": 0.5, "brown": 1.0}
_NOISE_S = 20


def augment(
    clip: NDArray[np.int16], others: Sequence[NDArray[np.int16]], rng: np.random.Generator
) -> Samples:
    """Return the clip as it might arrive from a user, in a share of `TELEPHONE_SHARE` over a
    telephone. `others`: recordings from which babble noise is mixed.
    """
    samples = at_microphone(clip, others, rng)
    return over_telephone(samples, rng) if rng.random() < TELEPHONE_SHARE else samples


def at_microphone(
    clip: NDArray[np.int16], others: Sequence[NDArray[np.int16]], rng: np.random.Generator
) -> Samples:
    """Return the clip as a microphone might record it, in the whole band."""
    samples: Samples = (clip / np.float32(32768)).astype(np.float32)
    if rng.random() < 0.5:
        samples = soxr.resample(samples, FASTEST ** rng.uniform(-1, 1), 1.0, quality="LQ").astype(
            np.float32
        )
    samples = _padded(samples, rng)
    response = _response(len(samples), rng)
    if response is not None:
        samples = _filtered(samples, response)
    if rng.random() < 0.6:
        samples = add_noise(samples, _noise(len(samples), others, rng), rng.uniform(*NOISE_DB))
    return _at_loudness(samples, rng)


def over_telephone(samples: Samples, rng: np.random.Generator) -> Samples:
    """Return samples after a random telephone line, of the same length."""
    if rng.random() < LINE_SHARE:
        samples = _filtered(samples, _line(_fft_size(len(samples)), rng))
    law: g711.Law = "mu" if rng.random() < 0.5 else "a"
    return through_g711(samples, law, "HQ" if rng.random() < 0.5 else "MQ")


def through_g711(samples: Samples, law: g711.Law, quality: str = "MQ") -> Samples:
    """Return samples after G.711: 8 kHz, eight bits. `quality`: quality of soxr's resampling, which
    sets how much remains near 4 kHz; a gateway uses MQ.
    """
    narrow = soxr.resample(samples, SAMPLE_RATE_HZ, g711.RATE_HZ, quality=quality)
    pcm = np.clip(np.rint(narrow * 32_767), -32_767, 32_767).astype(np.int16)
    decoded = (g711.decode(g711.encode(pcm, law), law) / 32_768).astype(np.float32)
    wide = soxr.resample(decoded, g711.RATE_HZ, SAMPLE_RATE_HZ, quality=quality)
    wide = wide[: len(samples)].astype(np.float32)
    return np.pad(wide, (0, len(samples) - len(wide)))


def add_noise(samples: Samples, noise: Samples, snr_db: float) -> Samples:
    """Mix in noise at a signal-to-noise ratio of `snr_db`. The speech power is the mean over its
    loudest half, in steps of 100 ms, so that pauses do not count.
    """
    power = _power(samples) / max(_power(noise), 1e-12)
    return (samples + noise * (np.sqrt(power) * 10 ** (-snr_db / 20))).astype(np.float32)


def _power(samples: Samples) -> float:
    size = SAMPLE_RATE_HZ // 10
    each = (
        np.square(samples[: len(samples) // size * size].reshape(-1, size)).mean(1)
        if len(samples) >= size
        else np.zeros(1)
    )
    return float(np.sort(each)[len(each) // 2 :].mean())


def coloured(kind: str, num_samples: int, rng: np.random.Generator) -> Samples:
    """Return `num_samples` of `white`, `pink` or `brown` noise with a power of 1, cut at a random
    offset from a fixed noise of 20 s.
    """
    return np.take(
        _coloured(kind), np.arange(num_samples) + rng.integers(len(_coloured(kind))), mode="wrap"
    )


@cache
def _coloured(kind: str) -> Samples:
    spectrum = np.fft.rfft(np.random.default_rng(1).standard_normal(_NOISE_S * SAMPLE_RATE_HZ))
    spectrum /= np.maximum(np.arange(len(spectrum)), 20 * _NOISE_S) ** _NOISE_SLOPES[kind]
    noise = np.fft.irfft(spectrum)
    return (noise / noise.std()).astype(np.float32)


def _noise(
    num_samples: int, others: Sequence[NDArray[np.int16]], rng: np.random.Generator
) -> Samples:
    kind = str(rng.choice([*_NOISE_SLOPES, "babble"]))
    if kind != "babble":
        return coloured(kind, num_samples, rng)
    noise = np.zeros(num_samples, np.float32)
    for index in rng.integers(len(others), size=int(rng.integers(2, 6))):
        noise += np.take(
            others[index], np.arange(num_samples) + rng.integers(num_samples), mode="wrap"
        )
    return noise


def _padded(samples: Samples, rng: np.random.Generator) -> Samples:
    # Squared, because most recordings have little silence around the speech.
    before, after = (int(share**2 * MAX_SILENCE_S * SAMPLE_RATE_HZ) for share in rng.random(2))
    return np.pad(samples, (before, after))


def _response(num_samples: int, rng: np.random.Generator) -> NDArray[Any] | None:
    """Return the combined frequency response of a random room and microphone; None if neither is
    applied.
    """
    effects: tuple[tuple[float, Callable[[int, np.random.Generator], NDArray[Any]]], ...] = (
        (0.25, _room),
        (0.3, _microphone),
    )
    size = _fft_size(num_samples)
    chosen = [make(size, rng) for share, make in effects if rng.random() < share]
    return np.prod(chosen, axis=0) if chosen else None


def _fft_size(num_samples: int) -> int:
    """Return an FFT size with room for `num_samples` and the longest echo. Only whole half seconds
    are used, since the FFT is fast for these sizes.
    """
    half_s = SAMPLE_RATE_HZ // 2
    return half_s * (2 + num_samples // half_s)


def _filtered(samples: Samples, response: NDArray[Any]) -> Samples:
    spectrum = np.fft.rfft(samples, _fft_size(len(samples)))
    return np.fft.irfft(spectrum * response, _fft_size(len(samples)))[: len(samples)].astype(
        np.float32
    )


def _room(size: int, rng: np.random.Generator) -> NDArray[Any]:
    num_samples = int(rng.uniform(*REVERB_S) * SAMPLE_RATE_HZ)
    echo = rng.standard_normal(num_samples) * np.exp(-6.9 * np.arange(num_samples) / num_samples)
    echo *= 10 ** (rng.uniform(-20, 0) / 20) / np.sqrt(np.square(echo).sum())
    echo[0] += 1
    return np.fft.rfft(echo, size)


def _microphone(size: int, rng: np.random.Generator) -> NDArray[Any]:
    points = rng.uniform(-COLOUR_DB, COLOUR_DB, COLOUR_POINTS)
    at = np.linspace(0, COLOUR_POINTS - 1, size // 2 + 1)
    return 10 ** (np.interp(at, np.arange(COLOUR_POINTS), points) / 20)


def _line(size: int, rng: np.random.Generator) -> NDArray[Any]:
    low_hz, high_hz = (rng.uniform(*range_hz) for range_hz in LINE_HZ)
    hz = np.fft.rfftfreq(size, 1 / SAMPLE_RATE_HZ)
    return 1 / np.sqrt(1 + (low_hz / np.maximum(hz, 1)) ** 6 + (hz / high_hz) ** 12)


def _at_loudness(samples: Samples, rng: np.random.Generator) -> Samples:
    loudest = max(float(np.abs(samples).max()), 1e-6)
    wanted = 10 ** (rng.uniform(*LOUDNESS_DB) / 20)
    return np.clip(samples * np.float32(wanted / loudest), -1, 1)
