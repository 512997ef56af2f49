"""Which words of a spoken text were heard, by how much of its speech was: history must not hold what nobody heard. Pure.

Silence says no word: what lies before, between and behind the words is left out of the share.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""Samples, the first and the one behind the last."""
HOP_SAMPLES = 240
QUIET, QUIET_PART = 33, 0.02
"""Of PCM16, and of the loudest hop: an RMS below is silence."""
MIN_SILENCE_HOPS = 5
"""A stop within a word is shorter."""
UNSURE_SAMPLES = 6000
"""The last 0.25 s of what was played: words differ in pace, and what has left the player has not all reached the ear.

Of all moments to stop aligned speech at, one in 250 then keeps a word too many, and one in 100 three too few.
"""
DEFAULT_CHAR_S = 0.068
"""Seconds of speech per character, before any answer was whole: 14 to 15 characters a second."""
CAUTION = 1.05
"""Where the length of the whole is a guess, it is taken as a little longer: rather a word too few than one nobody heard."""
MAX_WORD = 32
WEIGHT = 0.3


class SpeakingRate:
    """How long a character takes, learnt from answers whose sound is whole. Units: seconds of speech; one for each voice."""

    def __init__(self) -> None:
        self._char_s: dict[str, float] = {}

    def learn(self, voice: str, text: str, speech_s: float) -> None:
        if len(text) < 8 or speech_s <= 0:
            return
        told = speech_s / len(text)
        known = self._char_s.get(voice, told)
        self._char_s[voice] = known + WEIGHT * (told - known)

    def whole_s(self, voice: str, text: str, made_s: float, *, text_whole: bool) -> float:
        """How long the speech of `text` will be; `made_s` of it are made, which is the least it can be."""
        char_s = self._char_s.get(voice, DEFAULT_CHAR_S)
        return max(char_s * len(text) * CAUTION, made_s if text_whole else 0.0)


def silences(pcm: NDArray[np.int16]) -> list[Span]:
    """The stretches of a sound at 24 kHz in which nothing is said, in order."""
    hops = pcm[: len(pcm) // HOP_SAMPLES * HOP_SAMPLES].reshape(-1, HOP_SAMPLES).astype(np.float32)
    level = np.sqrt((hops**2).mean(axis=1))
    quiet = np.concatenate([[False], level <= max(QUIET, QUIET_PART * float(level.max(initial=0.0))), [False]])
    edges = np.flatnonzero(quiet[1:] != quiet[:-1]).reshape(-1, 2)
    return [(int(a) * HOP_SAMPLES, int(b) * HOP_SAMPLES) for a, b in edges if b - a >= MIN_SILENCE_HOPS]


def speech_until(sample: int, silent: Iterable[Span]) -> int:
    """How many of the samples before this one are speech."""
    return sample - sum(min(sample, end) - start for start, end in silent if start < sample)


def speech_heard(played: int, silent: Iterable[Span], whole: int) -> int:
    """How much speech was surely heard, once so many samples were played; `whole` is how much there is of it."""
    speech = speech_until(played, silent)
    return speech if speech >= whole else max(0, speech - UNSURE_SAMPLES)


def words_heard(text: str, heard: float, whole: float) -> str:
    """The beginning of `text` that was heard: whole words only, in proportion to the sound.

    Units: `heard` of `whole`, both seconds or both samples.
    """
    if whole <= 0 or heard >= whole:
        return text if heard > 0 or not text else ""
    cut = int(len(text) * max(0.0, heard) / whole)
    if cut < len(text) and not text[cut].isspace():
        begin = max(text.rfind(" ", 0, cut), text.rfind("\n", 0, cut)) + 1
        # A script without spaces, or a word nobody says in one breath: then by character.
        cut = begin if cut - begin <= MAX_WORD else cut
    return text[:cut].rstrip()
