"""Similarity of input audio and audio that was played: the model's own voice in the microphone.
Pure; knows no turn and no response.

Both are compared as energies of frequency bands over time, so that a room, a loudspeaker or a small
error of the delay changes little. Words of a person, alone or over the echo, have other energies.

Scores of the last 0.4 s of input, which begin up to 0.3 s before a voice is detected: percentiles
of 300 clips of espeak-ng, the echo 0.3 times as loud as what was played, 0 to 0.4 s late, in a room
with 60 ms of reverberation; the person has spoken for 0.1 to 0.4 s.

| input | 1 % | 5 % | 50 % | 95 % |
|---|---|---|---|---|
| echo, no reverberation | 0.87 | 0.94 | 0.99 | 1.00 |
| echo | 0.76 | 0.80 | 0.88 | 0.93 |
| a person | 0.25 | 0.30 | 0.54 | 0.77 |
| a person over the echo, equally loud or louder | 0.22 | 0.29 | 0.53 | 0.77 |

So a person who is taken for an echo at the first voiced frames is heard a few frames later.
"""

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.processing.voice_activity import RATE_HZ

Pcm = NDArray[np.int16]
HOP, WINDOW = RATE_HZ // 100, RATE_HZ // 50
"""Distance and length of the compared frames, in samples: 10 and 20 ms."""
NUM_BANDS, LOWEST_HZ, HIGHEST_HZ = 16, 200.0, 4000.0
COMPRESSION = 0.3
"""Exponent of the energies: loudness as people hear it, in which no single frame prevails."""
MAX_LEAD_S, MAX_DELAY_S = 0.1, 1.0
"""Limits of the delay of an echo, in seconds before and after the estimated playback."""
MIN_FRAMES = 12
WINDOW_S = 0.4
"""Length of the compared input, in seconds."""
ECHO_SCORE = 0.75
"""Score from which the input counts as an echo."""


def echo_score(heard: Pcm, played: Pcm, played_rate_hz: int) -> float:
    """Return the greatest similarity of `heard`, input at 16 kHz, to any part of `played`: 1 for an
    exact echo, about 0.5 for other speech (table above), 0 if either is too short to compare.
    Shapes: [samples] each.
    """
    reference = soxr.resample(played.astype(np.float32), played_rate_hz, RATE_HZ)
    heard_TB, reference_TB = _energies(heard.astype(np.float32)), _energies(reference)
    num_frames, num_lags = len(heard_TB), len(reference_TB) - len(heard_TB) + 1
    if num_frames < MIN_FRAMES or num_lags < 1:
        return 0.0
    centred_TB = heard_TB - heard_TB.mean(axis=0)
    norm = float(np.sqrt((centred_TB**2).sum()))
    windows_LBT = np.lib.stride_tricks.sliding_window_view(reference_TB, num_frames, axis=0)
    centred_LBT = windows_LBT - windows_LBT.mean(axis=2, keepdims=True)
    norms_L = np.sqrt((centred_LBT**2).sum(axis=(1, 2)))
    products_L = np.einsum("lbt,tb->l", centred_LBT, centred_TB)
    scale_L = norms_L * norm
    return float(np.divide(products_L, scale_L, where=scale_L > 1e-6, out=np.zeros(num_lags)).max())


def _energies(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the compressed energy of each band in each frame. Shapes: [T frames, B bands]."""
    if len(samples) < WINDOW:
        return np.zeros((0, NUM_BANDS))
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    spectrum = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), axis=1)) ** 2
    edges = np.geomspace(LOWEST_HZ, HIGHEST_HZ, NUM_BANDS + 1) * WINDOW / RATE_HZ
    bins = np.unique(np.round(edges).astype(int))
    sums = np.add.reduceat(spectrum, bins, axis=1)[:, :-1]
    return (sums / 1e6) ** COMPRESSION
