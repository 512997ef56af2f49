"""Input features of the audio tower: log-mel frames of 10 ms, computed as the server computes them
for a request's audio.

Source: WhisperFeatureExtractor of transformers 5.23.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import WhisperFeatureExtractor

from fleet.lab.pocket.hearing.recordings import SAMPLE_RATE_HZ
from fleet.models.qwen3_omni.audio_tower import mel_features


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMelBatch:
    """Log-mel features of a batch of clips.

    Shapes: `features` clips x 128 mel bins x frames; `num_frames` clips.
    Invariants: features are zero beyond a clip's own frames.
    """

    features: Tensor
    num_frames: Tensor

    def to_default_device(self) -> "LogMelBatch":
        """Return the batch on torch's default device."""
        device = torch.get_default_device()
        return LogMelBatch(features=self.features.to(device), num_frames=self.num_frames.to(device))


def log_mel(clips: Sequence[NDArray[Any]]) -> LogMelBatch:
    """Compute the log-mel features of clips on torch's default device. Units: samples in -1..1 at
    16 kHz.
    """
    extracted = mel_features(_extractor(), clips)
    features, mask = (torch.from_numpy(extracted[name]) for name in ("features", "feature_mask"))
    return LogMelBatch(
        features=features * mask[:, None], num_frames=mask.sum(1).long()
    ).to_default_device()


@cache
def _extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, sampling_rate=SAMPLE_RATE_HZ)
