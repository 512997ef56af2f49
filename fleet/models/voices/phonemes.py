"""Words to phonemes in the alphabet of Kokoro's and hibari's models, by hibari's pronunciation.

hibari's own text normalization is not used: texts come normalized.
"""

import json
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import hibari
from hibari.g2p import G2P

ASSETS = Path(hibari.__file__).parent / "assets"
MAX_PHONEMES = 400
"""Number of phonemes up to which the models speak an input well. Inputs of up to 510 phonemes are
accepted.
"""
_UNREADABLE = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError)
"""Errors of the pronunciation for words that are no words, such as `2\u2082H`."""


@cache
def vocabulary() -> dict[str, int]:
    """Return the id of each phoneme. Kokoro 1.0 defines the phonemes and ids."""
    return json.loads((ASSETS / "vocab.json").read_text(encoding="utf-8"))


class Pronunciation:
    """Pronunciation of English. `british`: whether British rules apply."""

    def __init__(self, *, british: bool) -> None:
        self._g2p = G2P(british=british)
        self.words("Loads the network for unknown wurds.")

    def words(self, text: str) -> list[str]:
        """Return the phonemes of each word of a text, its punctuation included; "" for a word that
        cannot be read.
        """
        words = text.split()
        try:
            said = self._say(text)
        except _UNREADABLE:
            said = []
        return said if len(said) == len(words) else [self._say_alone(word) for word in words]

    def _say(self, text: str) -> list[str]:
        said = [""]
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(text)):
            said[-1] += token.phonemes or ""
            if token.whitespace:
                said.append("")
        known = vocabulary()
        return ["".join(filter(known.__contains__, word.strip())) for word in said]

    def _say_alone(self, word: str) -> str:
        """Return the phonemes of one word, of its characters one by one if it cannot be read."""
        try:
            return "".join(self._say(word))
        except _UNREADABLE:
            return "".join(map(self._say_alone, word)) if len(word) > 1 else ""


@cache
def pronunciation(*, british: bool) -> Pronunciation:
    """Return the process's pronunciation, loaded on the first call, which takes half a second."""
    return Pronunciation(british=british)


def groups(words: Sequence[str]) -> list[list[str]]:
    """Divide the words of a clause into inputs of at most `MAX_PHONEMES`, spaces included. A word
    of more phonemes is cut.
    """
    divided: list[list[str]] = []
    length = MAX_PHONEMES
    for word in (word[:MAX_PHONEMES] for word in words):
        length += len(word) + 1
        if length > MAX_PHONEMES:
            divided.append([])
            length = len(word)
        divided[-1].append(word)
    return divided


def phoneme_ids(words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the model's input for words, and for each word the index in the input after the word's
    last phoneme. A word without phonemes ends where the word before it ends.
    """
    known = vocabulary()
    ids, ends = [0], list[int]()
    for word in words:
        if word and len(ids) > 1:
            ids.append(known[" "])
        ids.extend(chain(known[phoneme] for phoneme in word))
        ends.append(len(ids))
    return [*ids, 0], ends
