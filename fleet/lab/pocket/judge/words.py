"""Pronunciations for the recogniser: its dictionary reduced to Pocket's words, with pronunciations
of the teacher added.

Words with the same pronunciation are treated as one word.
Source: cmudict-en-us.dict of the pocketsphinx wheel, one `word phones` a line, `word(2) phones` for
another pronunciation.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import dialogues, sentences
from fleet.lab.pocket.corpus.salad import vocabulary
from fleet.lab.pocket.corpus.words import read_data

MISSING: Final[Mapping[str, str]] = {"oink": "OY NG K"}
"""Words of the corpus that the dictionary lacks."""
TEACHER_PRONUNCIATION: Final[Mapping[str, str]] = read_data("pronunciations")
"""Additional pronunciation of a word, where the teacher's phonemes (`espeak-ng -x -v en-us`) are
not in the dictionary.

43 of 776 words differ. Given both pronunciations, and lists of these words in both voices of the
teacher, the recogniser chose the additional one in 133 of 172 cases; three words for which it never
did (chicago, chocolate, real) are left out.
"""
NUM_READ = 4000
"""Number of held-out dialogues, and of held-out sentences, that are searched for words in no
training sentence.
"""
_PRONUNCIATION = re.compile(r"\(\d+\)$")


def model_folder() -> Path:
    """Return the folder of pocketsphinx's US English model: `en-us` (acoustic model) and
    `cmudict-en-us.dict`.

    Raises: ConfigError if pocketsphinx is not installed.
    """
    spec = find_spec("pocketsphinx")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "judging speech needs pocketsphinx; run `pip install 'fleet-serving[pocket]'`",
            param="pocket",
        )
    return Path(spec.origin).parent / "model" / "en-us"


@cache
def known_words() -> tuple[str, ...]:
    """Return every word of the corpus, of both splits."""
    held_out = {
        turn.text for dialogue in dialogues("held_out", NUM_READ, 0) for turn in dialogue.turns
    }
    held_out |= set(sentences("held_out", NUM_READ, 0))
    return tuple(sorted(set(vocabulary()) | {word for text in held_out for word in text.split()}))


@cache
def _dictionary() -> dict[str, tuple[str, ...]]:
    pronunciations: dict[str, tuple[str, ...]] = {}
    for line in (model_folder() / "cmudict-en-us.dict").read_text().splitlines():
        word, _, phones = line.partition(" ")
        plain = _PRONUNCIATION.sub("", word)
        pronunciations[plain] = (*pronunciations.get(plain, ()), phones)
    return pronunciations


@cache
def alike() -> tuple[tuple[str, ...], ...]:
    """Return the groups of known words with the same first pronunciation in the dictionary, such as
    "c", "sea" and "see".

    Further pronunciations do not count: casual ones would make "are" and "or" one word.
    """
    return tuple(words for words in _words_by_pronunciation().values() if len(words) > 1)


def by_pronunciation(text: str) -> str:
    """Replace each word of a text by the first known word with the same pronunciation, so that
    texts that sound alike are equal.
    """
    return " ".join(_first_alike(word) for word in text.split())


def _first_alike(word: str) -> str:
    return (
        word
        if unsayable([word])
        else _words_by_pronunciation().get(_pronunciations(word)[0], (word,))[0]
    )


@cache
def _words_by_pronunciation() -> Mapping[str, tuple[str, ...]]:
    """Return the known words grouped by their first pronunciation."""
    words: dict[str, tuple[str, ...]] = {}
    for word in known_words():
        phones = _pronunciations(word)[0]
        words[phones] = (*words.get(phones, ()), word)
    return words


def unsayable(words: Iterable[str]) -> list[str]:
    """Return the words, sorted, that have no pronunciation in the dictionary or in `MISSING`."""
    return sorted({word for word in words if word not in MISSING and word not in _dictionary()})


def dictionary_text(words: Iterable[str]) -> str:
    """Return a dictionary of `words` alone, in the recogniser's file format.

    Raises: ConfigError naming words without a pronunciation.
    """
    wanted = sorted(set(words))
    if unknown := unsayable(wanted):
        raise ConfigError(
            f"the recogniser has no pronunciation of {', '.join(unknown)}; add them to MISSING "
            "in judge/words.py",
            param="corpus",
        )
    lines: list[str] = []
    for word in wanted:
        for index, phones in enumerate(_pronunciations(word)):
            lines.append(f"{word}({index + 1}) {phones}" if index else f"{word} {phones}")
    return "\n".join(lines) + "\n"


def _pronunciations(word: str) -> tuple[str, ...]:
    """Return the pronunciations of a word. The dictionary's pronunciation is first, since the
    recogniser names words after their first pronunciation.
    """
    known = _dictionary().get(word) or (MISSING[word],)
    return (*known, TEACHER_PRONUNCIATION[word]) if word in TEACHER_PRONUNCIATION else known
