"""Words of a spoken text that were played, estimated from the share of its speech: the history must
hold no other words. Pure.

Silence before, between and after the words does not count as speech.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""First sample, and the one after the last."""
HOP_SAMPLES = 240
QUIET, QUIET_SHARE = 33, 0.02
"""A hop is silent if its RMS is at most `QUIET` of PCM16, or this share of the loudest hop."""
MIN_SILENCE_HOPS = 5
"""Longer than a stop consonant within a word."""
UNSURE_SAMPLES = 6000
"""The last 0.25 s that were played count as not played: words differ in pace, and players delay
their output.

Measured on aligned speech, one cut in 250 then retains a word too many, and one in 100 three too
few.
"""
DEFAULT_CHAR_S = 0.068
"""Seconds of speech per character before any response was complete: 14 to 15 characters a
second.
"""
CAUTION = 1.05
"""Factor on an estimated length: rather a word too few than one that was not played."""
MAX_WORD = 32
WEIGHT = 0.3


class SpeakingRate:
    """Seconds of speech per character of each voice, learned from complete responses."""

    def __init__(self) -> None:
        self._char_s: dict[str, float] = {}

    def learn(self, voice: str, text: str, speech_s: float) -> None:
        if len(text) < 8 or speech_s <= 0:
            return
        measured = speech_s / len(text)
        known = self._char_s.get(voice, measured)
        self._char_s[voice] = known + WEIGHT * (measured - known)

    def whole_s(self, voice: str, text: str, generated_s: float) -> float:
        """Estimate the length of the speech of `text`; at least the `generated_s` that exist."""
        char_s = self._char_s.get(voice, DEFAULT_CHAR_S)
        return max(char_s * len(text) * CAUTION, generated_s)


def find_silences(pcm: NDArray[np.int16]) -> list[Span]:
    """Find the silent spans of audio at 24 kHz, in order."""
    hops = pcm[: len(pcm) // HOP_SAMPLES * HOP_SAMPLES].reshape(-1, HOP_SAMPLES).astype(np.float32)
    level = np.sqrt((hops**2).mean(axis=1))
    quiet = np.concatenate(
        [[False], level <= max(QUIET, QUIET_SHARE * float(level.max(initial=0.0))), [False]]
    )
    edges = np.flatnonzero(quiet[1:] != quiet[:-1]).reshape(-1, 2)
    return [
        (int(a) * HOP_SAMPLES, int(b) * HOP_SAMPLES) for a, b in edges if b - a >= MIN_SILENCE_HOPS
    ]


def speech_until(sample: int, silent: Iterable[Span]) -> int:
    """Count the samples before this one that are speech."""
    return sample - sum(min(sample, end) - start for start, end in silent if start < sample)


def played_speech(played: int, silent: Iterable[Span], whole: int) -> int:
    """Count the samples of speech, of `whole`, that were certainly played once `played` samples
    were.
    """
    speech = speech_until(played, silent)
    return speech if speech >= whole else max(0, speech - UNSURE_SAMPLES)


def played_words(text: str, played: float, whole: float) -> str:
    """Return the beginning of `text` that was played: whole words only, in proportion to the
    speech.

    Units: `played` of `whole`, both seconds or both samples.
    """
    if whole <= 0 or played >= whole:
        return text if played > 0 or not text else ""
    cut = int(len(text) * max(0.0, played) / whole)
    if cut < len(text) and not text[cut].isspace():
        begin = max(text.rfind(" ", 0, cut), text.rfind("\n", 0, cut)) + 1
        # A script without spaces, or a word of absurd length, is cut by character.
        cut = begin if cut - begin <= MAX_WORD else cut
    return text[:cut].rstrip()
