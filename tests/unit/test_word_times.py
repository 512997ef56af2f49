"""Words of a transcript placed between the pauses of its sound, by their letters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.models.whisper.features import RATE_HZ
from fleet.models.whisper.word_times import (
    EXTRA_LETTERS,
    GAP,
    LINGER,
    MAX_SHIFT,
    FoundWords,
    find_pauses,
    place_words,
)

SPANS = ((0.5, 1.5), (2.0, 3.0))
"""Seconds of sound in a clip of 3.6 s."""


def clip(noise: float = 1e-4, seed: int = 0) -> np.ndarray:
    sound = np.random.default_rng(seed).normal(0, noise, int(3.6 * RATE_HZ))
    for begin, end in SPANS:
        part = slice(int(begin * RATE_HZ), int(end * RATE_HZ))
        sound[part] += np.random.default_rng(seed + 1).normal(0, 0.1, part.stop - part.start)
    return sound.astype(np.float32)


def words(*borders_s: float, letters: tuple[int, ...] = (), clause_ends: tuple[int, ...] = ()):
    num = len(borders_s) - 1
    return FoundWords(
        borders_B=np.array(borders_s) * RATE_HZ,
        num_letters_W=np.array(letters or (4,) * num, np.float64),
        ends_clause_W=np.isin(np.arange(num), clause_ends),
    )


def placed_s(samples: np.ndarray, found: FoundWords) -> np.ndarray:
    return np.stack(place_words(samples, found), axis=1) / RATE_HZ


def test_pauses_are_found_and_words_are_not_in_them() -> None:
    """The attention finds the second word 0.2 s before the pause ends, and the fourth one at once
    after it begins.
    """
    pauses_s = find_pauses(clip()) / RATE_HZ
    assert pauses_s == pytest.approx(np.array([[0, 0.5], [1.5, 2.0], [3.0, 3.6]]), abs=0.02)
    letters = (5, 3, 4, 4 - int(EXTRA_LETTERS))
    found = words(0.3, 1.05, 1.6, 2.55, 2.9, letters=letters, clause_ends=(1,))
    times = placed_s(clip(), found)
    assert times[:, 0] == pytest.approx([0.5, 1.0, 2.0, 2.5], abs=0.03)
    linger, gap = LINGER / RATE_HZ, GAP / RATE_HZ
    ends = [1.0 - gap, 1.5 + linger, 2.5 - gap, 3.0 + linger]
    assert times[:, 1] == pytest.approx(ends, abs=0.03)


def test_pause_belongs_to_a_clause_end_that_the_attention_finds_early() -> None:
    late, early = words(0.5, 1.0, 1.25, 3.0, clause_ends=(1,)), words(0.5, 1.0, 1.25, 3.0)
    assert placed_s(clip(), late)[2, 0] == pytest.approx(2.0, abs=0.02)
    assert placed_s(clip(), early)[2, 0] < 1.4, "without punctuation it is too far"


def test_soft_speech_is_no_pause() -> None:
    """Two borders lie deep in the quiet part: words are said there."""
    found = words(0.5, 1.68, 1.82, 3.0)
    assert placed_s(clip(), found)[1:, 0] == pytest.approx([1.68, 1.82], abs=0.11)


BORDERS = st.lists(st.floats(0, 3.6), min_size=2, max_size=12).map(sorted)


@given(BORDERS, st.integers(0, 2**16), st.booleans())
def test_words_stay_in_order_and_in_the_clip(
    borders_s: list[float], seed: int, steady: bool
) -> None:
    """Under steady noise, as in music, nothing moves further than the bound."""
    rng = np.random.default_rng(seed)
    samples = clip(noise=0.1 if steady else 1e-4, seed=seed)
    num = len(borders_s) - 1
    found = words(
        *borders_s,
        letters=tuple(rng.integers(1, 12, num).tolist()),
        clause_ends=tuple(np.flatnonzero(rng.integers(0, 2, num)).tolist()),
    )
    begins, ends = place_words(samples, found)
    assert (begins <= ends).all() and (ends[:-1] <= begins[1:]).all()
    assert begins[0] >= 0 and ends[-1] <= len(samples)
    assert np.array_equal(place_words(samples, found), (begins, ends))
    if steady:
        assert not len(find_pauses(samples))
        assert np.abs(begins - found.borders_B[:-1]).max() <= MAX_SHIFT + 1e-6


@pytest.mark.parametrize("num_samples", [0, 1, 1600])
def test_clip_too_short_for_a_pause(num_samples: int) -> None:
    begins, ends = place_words(np.zeros(num_samples, np.float32), words(0, 0, 0))
    assert begins.tolist() == ends.tolist() == [0, 0]
