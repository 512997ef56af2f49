"""Decoding of audio files, and similarity of signals."""

import io

import av
import numpy as np
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from tests.web.fake_client import RATE_HZ

Samples = NDArray[np.int16]


def decoded(file: bytes) -> Samples:
    """Decode an audio file to mono at the answer's rate, with a decoder that needs no length in the
    header.
    """
    resampler = AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
    with av.open(io.BytesIO(file), "r") as container:
        frames = [
            frame for found in container.decode(audio=0) for frame in resampler.resample(found)
        ]
    return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


def likeness(
    heard: Samples | NDArray[np.float32], expected: Samples | NDArray[np.float32]
) -> float:
    """Return the maximum of the normalized cross-correlation of two signals: 1 for equal ones."""
    size = 1 << (len(heard) + len(expected)).bit_length()
    spectra = [np.fft.rfft(sound.astype(np.float64), size) for sound in (heard, expected)]
    energy = np.sqrt(
        np.prod([np.sum(sound.astype(np.float64) ** 2) for sound in (heard, expected)])
    )
    return float(np.fft.irfft(spectra[0] * np.conj(spectra[1]), size).max() / energy)
