"""How the recogniser is told that words sound: its own dictionary, cut to Pocket's words, and the teacher's ways that it lacks.

What sounds alike is one to the ear, whoever speaks. Knows no audio and no language model.
Source: cmudict-en-us.dict of the pocketsphinx wheel, one `word phones` a line, `word(2) phones` for another way to say it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fleet.core.errors import ConfigError
from fleet.pocket.corpus import dialogues, sentences
from fleet.pocket.corpus.salad import vocabulary

MISSING: Final[Mapping[str, str]] = {"oink": "OY NG K"}
"""Words of the corpus that the dictionary lacks."""
TEACHERS_WAY: Final[Mapping[str, str]] = {
    "athens": "AE TH IH N Z", "baa": "B AA", "beautiful": "B Y UW T IY F AH L", "beijing": "B EY JH IH NG",
    "chicken": "CH IH K IH N", "chickens": "CH IH K IH N Z", "clara": "K L AA R AH", "dog": "D AA G",
    "elephant": "EH L IH F AH N T", "everything": "EH V R IH TH IH NG", "favourite": "F EY V R IH T", "hear": "HH IH R",
    "here": "HH IH R", "hexagon": "HH EH K S AE G AH N", "highest": "HH AY IH S T", "italian": "IH T AE L IY AH N",
    "julia": "JH UW L IY AH", "lisbon": "L IH S B AH N", "meow": "M IH AW", "mexico": "M EH K S IH K OW",
    "minute": "M IH N IH T", "minutes": "M IH N IH T S", "mountain": "M AW N T IH N", "octagon": "AA K T AE G AH N",
    "office": "AA F IH S", "opposite": "AA P AH Z IH T", "oscar": "AA S K ER", "oslo": "AA S L OW", "ottawa": "AA T AH W AH",
    "parrot": "P AE R AH T", "penguins": "P EH NG G W IH N Z", "pentagon": "P EH N T AE G AH N", "pocket": "P AA K IH T",
    "poor": "P UH R", "radio": "R EY D IH OW", "really": "R IY AH L IY", "saturday": "S AE T ER D EY",
    "stockholm": "S T AA K HH OW M", "thailand": "T AY L AH N D", "vietnam": "V IY AH T N AA M",
}  # fmt: skip
"""Another way to say a word, where the teacher's phonemes (`espeak-ng -x -v en-us`) are none of the dictionary's ways.

Of 776 words 43 were said otherwise. Aligned to lists of them in both voices of the teacher, the recogniser chose this way in 133
of 172 cases with the dictionary's beside it; the three words of which it never did (chicago, chocolate, real) are left out.
"""
NUM_READ = 4000
"""Held-out dialogues that are read for words which no sentence of training has."""
_ANOTHER_WAY = re.compile(r"\(\d+\)$")


def model_folder() -> Path:
    """pocketsphinx's own US English: `en-us` (sounds) and `cmudict-en-us.dict`. Raises: ConfigError if it is not installed."""
    spec = find_spec("pocketsphinx")
    if spec is None or spec.origin is None:
        raise ConfigError("judging speech needs pocketsphinx; run `pip install 'fleet-serving[pocket]'`", param="pocket")
    return Path(spec.origin).parent / "model" / "en-us"


@cache
def known_words() -> tuple[str, ...]:
    """Every word of the corpus, of both splits."""
    held_out = {turn.text for dialogue in dialogues("held_out", NUM_READ, 0) for turn in dialogue.turns}
    held_out |= set(sentences("held_out", NUM_READ, 0))
    return tuple(sorted(set(vocabulary()) | {word for text in held_out for word in text.split()}))


@cache
def _dictionary() -> dict[str, tuple[str, ...]]:
    ways: dict[str, tuple[str, ...]] = {}
    for line in (model_folder() / "cmudict-en-us.dict").read_text().splitlines():
        word, _, phones = line.partition(" ")
        plain = _ANOTHER_WAY.sub("", word)
        ways[plain] = (*ways.get(plain, ()), phones)
    return ways


@cache
def alike() -> tuple[tuple[str, ...], ...]:
    """The known words that no ear tells apart, such as "c", "sea" and "see": those of one first way in the dictionary.

    Not of any way: hurried ones would make "are" and "or" one word.
    """
    return tuple(words for words in _words_of_way().values() if len(words) > 1)


def by_sound(text: str) -> str:
    """Texts that sound alike made equal: each word as the first known one of those alike."""
    return " ".join(_first_alike(word) for word in text.split())


def _first_alike(word: str) -> str:
    return word if unsayable([word]) else _words_of_way().get(_ways(word)[0], (word,))[0]


@cache
def _words_of_way() -> Mapping[str, tuple[str, ...]]:
    """The known words of each first way."""
    words: dict[str, tuple[str, ...]] = {}
    for word in known_words():
        way = _ways(word)[0]
        words[way] = (*words.get(way, ()), word)
    return words


def unsayable(words: Iterable[str]) -> list[str]:
    """Words that neither the dictionary nor `MISSING` knows."""
    return sorted({word for word in words if word not in MISSING and word not in _dictionary()})


def dictionary_text(words: Iterable[str]) -> str:
    """A dictionary of `words` alone, as the recogniser reads it.

    Raises: ConfigError naming the words that nobody knows how to say.
    """
    wanted = sorted(set(words))
    if unknown := unsayable(wanted):
        raise ConfigError(
            f"the recogniser cannot say {', '.join(unknown)}; add them to MISSING in judge/words.py", param="corpus"
        )
    lines: list[str] = []
    for word in wanted:
        for index, phones in enumerate(_ways(word)):
            lines.append(f"{word}({index + 1}) {phones}" if index else f"{word} {phones}")
    return "\n".join(lines) + "\n"


def _ways(word: str) -> tuple[str, ...]:
    """The dictionary's first, for the recogniser names a word by it."""
    known = _dictionary().get(word) or (MISSING[word],)
    return (*known, TEACHERS_WAY[word]) if word in TEACHERS_WAY else known
