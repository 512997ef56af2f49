"""Where words begin and end, from the attention to the audio and the audio itself.

The attention finds a word, but moves on early, late in a pause, or far into a long word. Two facts
correct it: no word is in a pause, and the words between two pauses share the time by their letters.
The idea of the first: stable-ts 2.19 (`suppress_silence`). The constants were chosen on 38 of 75
sentences of two voices, whose models know the words' times.
Legend: W words. Units: samples at `RATE_HZ`, if not named.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.engine.recognizer import Samples
from fleet.models.whisper.features import RATE_HZ

Times = NDArray[np.float64]
HOP = RATE_HZ // 100
QUIET_DB, LOUD_HOPS, MIN_PAUSE_HOPS = 35.0, 20, 10
"""A hop (10 ms) is quiet if it is more than `QUIET_DB` below the level of the `LOUD_HOPS`-th
loudest hop. At least `MIN_PAUSE_HOPS` quiet hops in a row are a pause; the closure of a stop
consonant is shorter.
"""
NEAR, NEAR_CLAUSE_END, NEAR_EDGE = 0.1 * RATE_HZ, 0.3 * RATE_HZ, 0.35 * RATE_HZ
"""Largest distance between a pause and the word border that it is assigned to: for a border between
words, for a border after punctuation, and for the first and the last border.
"""
CROSSED = 0.15 * RATE_HZ
"""A pause is taken for soft speech if another border is inside it by more than this distance."""
STIFFNESS = 2.0
"""Weight of the expected duration of a word of one letter, relative to the weight of a border that
the attention finds. The weight decreases with the number of letters.
"""
EXTRA_LETTERS = 2.0
"""Letters added to the length of a word before a pause, which is spoken more slowly."""
MAX_SHIFT = 0.1 * RATE_HZ
"""Largest shift of a border that no pause determines."""
LINGER, GAP = 0.3 * RATE_HZ, 0.05 * RATE_HZ
"""A word before a pause ends `LINGER` after the pause begins; any other word ends `GAP` before the
next word begins. Chosen to agree with the word times that the voices report.
"""
FIXED = 1e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundWords:
    """Words as the attention finds them. `borders_B`: beginning of each word, and end of the
    last one, ascending, B = W + 1. `num_letters_W`: length of each word as it is spoken.
    `ends_clause_W`: whether punctuation follows.
    """

    borders_B: Times
    num_letters_W: NDArray[np.float64]
    ends_clause_W: NDArray[np.bool_]


def place_words(samples: Samples, words: FoundWords) -> tuple[Times, Times]:
    """Return where each word begins and ends in `samples`: float64 [W], [W]. Invariants: no word
    ends before it begins, or after the next one begins.
    """
    silence_B2, fixed_B = _silences(find_pauses(samples), words, len(samples))
    borders_B = _shared_by_letters(words, silence_B2, fixed_B)
    is_pause_B = silence_B2[:, 1] > silence_B2[:, 0]
    begins_B = np.where(is_pause_B, silence_B2[:, 1], borders_B).clip(0, len(samples))
    begins_B = np.maximum.accumulate(begins_B)
    ends_W = np.where(is_pause_B[1:], borders_B[1:] + LINGER, borders_B[1:] - GAP)
    ends_W = np.minimum(ends_W, begins_B[1:])
    return begins_B[:-1], np.maximum(ends_W, begins_B[:-1])


def find_pauses(samples: Samples) -> NDArray[np.int64]:
    """Return the pauses in order: first sample, and sample after the last: int64 [pauses, 2]. Noise
    as loud as quiet speech leaves none.
    """
    num_hops = len(samples) // HOP
    if num_hops < LOUD_HOPS:
        return np.zeros((0, 2), np.int64)
    power = (samples[: num_hops * HOP].astype(np.float64) ** 2).reshape(num_hops, HOP).mean(axis=1)
    around = np.convolve(power, [0.25, 0.5, 0.25], "same")
    level_db = 10 * np.log10(around + 1e-10)
    quiet = level_db < np.partition(level_db, -LOUD_HOPS)[-LOUD_HOPS] - QUIET_DB
    edges = np.flatnonzero(np.diff(np.concatenate(([0], quiet, [0])))).reshape(-1, 2)
    return edges[edges[:, 1] - edges[:, 0] >= MIN_PAUSE_HOPS] * HOP


def _silences(
    pauses: NDArray[np.int64], words: FoundWords, num_samples: int
) -> tuple[Times, NDArray[np.bool_]]:
    """Return the silence at each border, float64 [B, 2], of length 0 at a border without a pause;
    and whether each border is certain, as the first, the last and any border at a pause are.
    """
    borders_B = words.borders_B
    silence_B2 = np.stack([borders_B, borders_B], axis=1)
    fixed_B = np.zeros(len(borders_B), np.bool_)
    near_B = np.full(len(borders_B), NEAR)
    near_B[1:][words.ends_clause_W] = NEAR_CLAUSE_END
    near_B[[0, -1]] = NEAR_EDGE
    for begin, end in pauses.tolist():
        beyond_B = np.maximum(begin - borders_B, borders_B - end).clip(0) - near_B
        border = 1 + int(beyond_B[1:-1].argmin()) if len(borders_B) > 2 else 0
        is_after_B, is_before_B = borders_B > begin + CROSSED, borders_B < end - CROSSED
        if begin == 0:
            border, is_after_B[:] = 0, True
        elif end > num_samples - 2 * HOP:
            border, is_before_B[:] = len(borders_B) - 1, True
        is_crossed_B = is_after_B & is_before_B
        is_crossed_B[border] = False
        if beyond_B[border] <= 0 and not fixed_B[border] and not is_crossed_B.any():
            silence_B2[border], fixed_B[border] = (begin, end), True
    fixed_B[[0, -1]] = True
    return silence_B2, fixed_B


def _shared_by_letters(words: FoundWords, silence_B2: Times, fixed_B: NDArray[np.bool_]) -> Times:
    """Return the borders. Every border that is not certain is moved, by at most `MAX_SHIFT`, so
    that the durations of words between certain borders agree with the numbers of letters (least
    squares).
    """
    before_B, pause_B = silence_B2[:, 0], silence_B2[:, 1] - silence_B2[:, 0]
    letters_W = words.num_letters_W + EXTRA_LETTERS * (pause_B[1:] > 0)
    certain = np.flatnonzero(fixed_B)
    part_W = np.cumsum(fixed_B[:-1]) - 1
    spoken = np.diff(before_B[certain]) - pause_B[certain[:-1]]
    per_letter = spoken.clip(HOP) / np.bincount(part_W, letters_W)
    expected_W = per_letter[part_W] * letters_W + pause_B[:-1]
    lengths_WB = np.diff(np.eye(len(fixed_B)), axis=0)
    stiff_WB = (STIFFNESS / letters_W)[:, None] * lengths_WB
    weight_B = np.where(fixed_B, FIXED, 1.0)
    moved_B = np.linalg.solve(
        np.diag(weight_B) + lengths_WB.T @ stiff_WB, weight_B * before_B + stiff_WB.T @ expected_W
    )
    bounded_B = moved_B.clip(words.borders_B - MAX_SHIFT, words.borders_B + MAX_SHIFT)
    return np.maximum.accumulate(np.where(fixed_B, before_B, bounded_B))
