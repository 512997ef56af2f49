"""Quantisation of a frame to eight codes: seven codes from residual codebooks of its features, then
its number of glottal cycles.

A frame's 8 x 51 features are projected onto 128 principal axes and quantised by k-means; each
codebook quantises the residual of the previous one. Nothing is trained by gradient, so the codes
are fixed before any network is trained.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleet.lab.pocket.shape import CODEBOOK_SIZE, NUM_CODE_GROUPS
from fleet.lab.pocket.speech.analysis import NUM_FEATURES, NUM_MELS
from fleet.lab.pocket.speech.wordlock import HOPS_PER_FRAME

NUM_AXES: Final = 128
NUM_SOUND_GROUPS: Final = NUM_CODE_GROUPS - 1
_NATS_PER_DB = 0.7 / 6
"""Weight of aperiodicity relative to loudness: 1 dB of noise share counts as much as 0.12 nat of
power.
"""
_ROUNDS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Codebook:
    """Residual codebooks that quantise frame features.

    Shapes: mean [408]; axes [408, 128] orthonormal; centroids [7, 512, 128].
    """

    mean: Tensor
    axes: Tensor
    centroids: Tensor

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(
            self.mean.numpy().tobytes() + self.centroids.numpy().tobytes()
        ).hexdigest()[:16]

    def encode(self, features: NDArray[np.float16], cycles: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the codes [T, 8] of features [T, 8, 51] and glottal cycles [T]."""
        residual = (_vectors(features) - self.mean) @ self.axes
        codes: list[Tensor] = []
        for centroids in self.centroids:
            codes.append(_nearest(residual, centroids))
            residual = residual - centroids[codes[-1]]
        return np.concatenate(
            [torch.stack(codes, 1).numpy().astype(np.int16), cycles[:, None]], axis=1
        )

    def decode(self, codes: NDArray[np.int16]) -> NDArray[np.float32]:
        """Return the features [T, 8, 51] of codes [T, 8]; the codes of the glottal cycles are not
        used.
        """
        chosen = torch.from_numpy(codes[:, :NUM_SOUND_GROUPS].astype(np.int64))
        projected = sum(
            (self.centroids[group][chosen[:, group]] for group in range(NUM_SOUND_GROUPS)),
            torch.zeros(NUM_AXES),
        )
        features = (
            (projected @ self.axes.T + self.mean).reshape(-1, HOPS_PER_FRAME, NUM_FEATURES).numpy()
        )
        features[..., NUM_MELS:] /= _NATS_PER_DB
        return features

    def save(self, path: Path) -> None:
        save_file({"mean": self.mean, "axes": self.axes, "centroids": self.centroids}, path)

    @classmethod
    def load(cls, path: Path) -> "Codebook":
        return cls(**load_file(path))


def fit(
    features: NDArray[np.float16], *, seed: int, codebook_size: int = CODEBOOK_SIZE
) -> Codebook:
    """Fit the codebook to the features [N, 8, 51] of frames."""
    vectors = _vectors(features)
    mean = vectors.mean(0)
    # Eigenvectors of the covariance, which is 408 x 408 for any number of frames.
    axes = (
        torch.linalg.eigh((vectors - mean).T @ (vectors - mean))
        .eigenvectors.flip(1)[:, :NUM_AXES]
        .contiguous()
    )
    generator = torch.Generator().manual_seed(seed)
    centroids = list(_residual_centroids((vectors - mean) @ axes, codebook_size, generator))
    return Codebook(mean=mean, axes=axes, centroids=torch.stack(centroids))


def _residual_centroids(
    residual: Tensor, codebook_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    for _ in range(NUM_SOUND_GROUPS):
        centroids = _k_means(residual, codebook_size, generator)
        yield centroids
        residual = residual - centroids[_nearest(residual, centroids)]


def _k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` centroids [count, D] of the points. A centroid that loses all its points moves
    to a random point.
    """
    centroids = points[torch.randperm(len(points), generator=generator)[:count]].clone()
    for _ in range(_ROUNDS):
        owner = _nearest(points, centroids)
        sizes = torch.bincount(owner, minlength=count)
        centroids = (
            torch.zeros_like(centroids).index_add_(0, owner, points) / sizes.clamp(min=1)[:, None]
        )
        empty = (sizes == 0).nonzero()[:, 0]
        centroids[empty] = points[torch.randint(len(points), (len(empty),), generator=generator)]
    return centroids


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    return torch.addmm((centroids**2).sum(1)[None], points, centroids.T, alpha=-2).argmin(1)


def _vectors(features: NDArray[np.float16]) -> Tensor:
    vectors = torch.from_numpy(features.astype(np.float32))
    vectors[..., NUM_MELS:] *= _NATS_PER_DB
    return vectors.flatten(1)
