"""Words that do not exist: the beginning of one word joined to the end of another, so that neither
predicts the other.
"""

from functools import cache
from random import Random

from fleet.lab.pocket.corpus.words import WORDS

MIN_LETTERS, MAX_LETTERS = 3, 9


@cache
def _real() -> tuple[str, ...]:
    lists = ("colours", "objects", "places", "animals", "foods", "names", "cities", "others")
    return tuple(sorted({word for name in lists for word in WORDS[name]}))


def invented(rng: Random) -> str:
    """Return a word that is in none of the word lists."""
    while True:
        head, tail = rng.choice(_real()), rng.choice(_real())
        word = head[: rng.randint(1, len(head) - 1)] + tail[-rng.randint(1, len(tail) - 1) :]
        if MIN_LETTERS <= len(word) <= MAX_LETTERS and word not in _real():
            return word


def nonsense(rng: Random, max_words: int) -> str:
    """Return at least two words, of which one is invented."""
    text = [
        rng.choice(_real()) if rng.random() < 0.6 else invented(rng)
        for _ in range(rng.randint(1, max_words - 1))
    ]
    text.insert(rng.randint(0, len(text)), invented(rng))
    return " ".join(text)
