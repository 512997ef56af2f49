"""Quantization of speech feature frames to codes and back."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.lab.pocket.speech.analysis import NUM_FEATURES, NUM_MELS
from fleet.lab.pocket.speech.codes import NUM_SOUND_GROUPS, Codebook, fit


def frames(count: int, seed: int) -> NDArray[np.float16]:
    """Return feature frames [count, 8, 51] near a subspace of few dimensions, as speech is."""
    rng, basis = (
        np.random.default_rng(seed),
        np.random.default_rng(0).standard_normal((6, 8 * NUM_FEATURES)),
    )
    flat = rng.standard_normal((count, 6)) @ basis + 0.05 * rng.standard_normal(
        (count, 8 * NUM_FEATURES)
    )
    shaped = flat.reshape(count, 8, NUM_FEATURES)
    shaped[..., NUM_MELS:] *= 6
    return (shaped - 5).astype(np.float16)


def cycles(count: int) -> NDArray[np.int16]:
    return (np.arange(count) % 20).astype(np.int16)


@pytest.fixture(scope="module")
def book() -> Codebook:
    return fit(frames(400, seed=1), seed=3, codebook_size=16)


def error(book: Codebook, groups: int) -> float:
    """Return the RMS error of unseen frames that are quantized with the first `groups` groups of
    codes.
    """
    fresh = frames(300, seed=2)
    cut = Codebook(mean=book.mean, axes=book.axes, centroids=book.centroids.clone())
    cut.centroids[groups:] = 0
    decoded = cut.decode(book.encode(fresh, cycles(300)))
    return float(np.sqrt(((decoded - fresh.astype(np.float32))[..., :NUM_MELS] ** 2).mean()))


def test_each_code_group_reduces_the_error(book: Codebook) -> None:
    errors = [error(book, groups) for groups in range(NUM_SOUND_GROUPS + 1)]
    assert all(after < before for before, after in zip(errors, errors[1:], strict=False)), errors
    assert errors[-1] < 0.3 * errors[0]


def test_codes_are_in_range_and_end_with_cycles(book: Codebook) -> None:
    codes = book.encode(frames(300, seed=2), cycles(300))
    assert codes.shape == (300, 8) and codes.dtype == np.int16
    assert np.array_equal(codes[:, -1], cycles(300))
    assert codes[:, :-1].min() == 0 and codes[:, :-1].max() < 16


def test_every_centroid_is_used(book: Codebook) -> None:
    codes = book.encode(frames(400, seed=1), cycles(400))
    assert all(len(np.unique(codes[:, group])) >= 15 for group in range(NUM_SOUND_GROUPS))


def test_codebook_axes_are_orthonormal(book: Codebook) -> None:
    assert (book.axes.T @ book.axes).numpy() == pytest.approx(np.eye(book.axes.shape[1]), abs=1e-4)


def test_codebook_depends_on_seed_and_survives_saving(book: Codebook, tmp_path: Path) -> None:
    again = fit(frames(400, seed=1), seed=3, codebook_size=16)
    again.save(tmp_path / "book.safetensors")
    loaded = Codebook.load(tmp_path / "book.safetensors")
    assert loaded.fingerprint == again.fingerprint == book.fingerprint
    assert fit(frames(400, seed=1), seed=4, codebook_size=16).fingerprint != book.fingerprint
