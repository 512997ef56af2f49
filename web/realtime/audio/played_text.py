"""The words of a spoken response that the client has played; the history must contain no other
words. Pure.

Where the voice tells when its words end, `ended_words` finds them exactly. Otherwise they are
estimated from the share of the speech that was played; silence before, between and after the words
does not count as speech.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""A range of samples: the first sample, and the sample after the last."""
HOP_SAMPLES = 240
QUIET, QUIET_SHARE = 33, 0.02
"""Limit of the RMS of a silent block of `HOP_SAMPLES`: `QUIET` in units of PCM16, or `QUIET_SHARE`
of the loudest block.
"""
MIN_SILENCE_HOPS = 5
"""Least number of blocks of a silence; longer than a stop consonant within a word."""
UNSURE_SAMPLES = 6000
"""Length of the last played audio (0.25 s) that does not count as played: words differ in pace, and
players delay their output.

Measured on aligned speech, one cut in 250 then retains a word too many, and one in 100 three words
too few.
"""
DEFAULT_CHAR_S = 0.068
"""Seconds of speech per character (14 to 15 characters a second), for a voice that has not spoken a
complete response.
"""
CAUTION = 1.05
"""Factor by which an estimated length of speech is increased, so that a cut response rather lacks a
played word than contains an unplayed word.
"""
MAX_WORD = 32
WEIGHT = 0.3


def ended_words(text: str, word_ends: Iterable[tuple[int, int]], played: int) -> str:
    """Return the beginning of `text` up to the last word whose end the client has played.
    `word_ends` has, for each word, the characters of `text` and the samples of the audio up to its
    end; both never decrease.
    """
    if played <= 0:
        return ""
    num_chars = max((chars for chars, end in word_ends if end <= played), default=0)
    return text if num_chars >= len(text) else text[: max(0, num_chars)].rstrip()


class SpeakingRate:
    """Speaking rate of each voice in seconds per character, learned from complete responses."""

    def __init__(self) -> None:
        self._char_s: dict[str, float] = {}

    def learn(self, voice: str, text: str, speech_s: float) -> None:
        if len(text) < 8 or speech_s <= 0:
            return
        measured = speech_s / len(text)
        known = self._char_s.get(voice, measured)
        self._char_s[voice] = known + WEIGHT * (measured - known)

    def whole_s(self, voice: str, text: str, generated_s: float) -> float:
        """Estimate the length in seconds of the speech of `text`; at least `generated_s`, the
        length that has been generated.
        """
        char_s = self._char_s.get(voice, DEFAULT_CHAR_S)
        return max(char_s * len(text) * CAUTION, generated_s)


def find_silences(pcm: NDArray[np.int16]) -> list[Span]:
    """Return the silent ranges of `pcm`, audio at 24 kHz, in order."""
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
    """Count the samples before `sample` that are not in the silent ranges of the audio."""
    return sample - sum(min(sample, end) - start for start, end in silent if start < sample)


def played_speech(played: int, silent: Iterable[Span], whole: int) -> int:
    """Count the samples of speech that the client has certainly played, if it has played the first
    `played` samples of the audio. `silent` are the silent ranges of the audio, and `whole` is its
    total number of samples of speech.
    """
    speech = speech_until(played, silent)
    return speech if speech >= whole else max(0, speech - UNSURE_SAMPLES)


def played_words(text: str, played: float, whole: float) -> str:
    """Return the beginning of `text` that was played: whole words only, in proportion to the played
    part of the speech.

    Units: `played` and `whole` are lengths of speech, both in seconds or both in samples.
    """
    if whole <= 0 or played >= whole:
        return text if played > 0 or not text else ""
    cut = int(len(text) * max(0.0, played) / whole)
    if cut < len(text) and not text[cut].isspace():
        begin = max(text.rfind(" ", 0, cut), text.rfind("\n", 0, cut)) + 1
        # A script without spaces, or a word of absurd length, is cut by character.
        cut = begin if cut - begin <= MAX_WORD else cut
    return text[:cut].rstrip()
