"""Log-mel features of a window of speech, as `WhisperFeatureExtractor` computes them.

Source: transformers 5.23, models/whisper/feature_extraction_whisper.py and audio_utils.py
(`mel_filter_bank` with the scale and norm "slaney"). Legend: M mel bins, F frames of 10 ms.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RATE_HZ = 16_000
FFT_SAMPLES, HOP_SAMPLES = 400, 160
_LINEAR_HZ, _LINEAR_STEP_HZ, _LOG_STEP = 1000.0, 200.0 / 3, 27.0 / np.log(6.4)
"""Slaney's mel scale: linear up to 1 kHz, logarithmic above."""


class LogMel:
    """Computation of features with `num_mels` bins on one device."""

    def __init__(self, num_mels: int, device: torch.device) -> None:
        filters_KM = torch.from_numpy(mel_filters(num_mels)).float()
        self._filters_MK = filters_KM.T.contiguous().to(device)
        self._hann = torch.hann_window(FFT_SAMPLES, device=device)

    def of(self, samples: NDArray[np.float32], num_samples: int) -> Tensor:
        """Return the features of a window of `num_samples` that begins with `samples` and ends with
        silence: float32 [M, F].
        """
        wave = torch.zeros(num_samples, device=self._hann.device)
        wave[: len(samples)] = torch.tensor(samples[:num_samples], device=wave.device)
        spectrum_KF = torch.stft(
            wave, FFT_SAMPLES, HOP_SAMPLES, window=self._hann, return_complex=True
        )[:, :-1]
        mel_MF = self._filters_MK @ (spectrum_KF.abs() ** 2).contiguous()
        log_MF = mel_MF.clamp_(min=1e-10).log10_()
        return (log_MF.clamp_(min=float(log_MF.max()) - 8.0) + 4.0) / 4.0


def mel_filters(num_mels: int) -> NDArray[np.float64]:
    """Return the weights of triangular mel filters: [frequency bins, M]."""
    edges_hz = _to_hz(np.linspace(0.0, _to_mel(RATE_HZ / 2), num_mels + 2))
    bins_hz = np.linspace(0.0, RATE_HZ / 2, FFT_SAMPLES // 2 + 1)
    slopes = edges_hz[None, :] - bins_hz[:, None]
    widths = np.diff(edges_hz)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges_hz[2:] - edges_hz[:-2]))


def _to_mel(hz: float) -> float:
    if hz < _LINEAR_HZ:
        return hz / _LINEAR_STEP_HZ
    return _LINEAR_HZ / _LINEAR_STEP_HZ + float(np.log(hz / _LINEAR_HZ)) * _LOG_STEP


def _to_hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    knee = _LINEAR_HZ / _LINEAR_STEP_HZ
    above = _LINEAR_HZ * np.exp((mels - knee) / _LOG_STEP)
    return np.where(mels < knee, mels * _LINEAR_STEP_HZ, above)
