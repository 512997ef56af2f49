"""Words that do not exist: the beginning of one word and the end of another, so that no beginning says how a word goes on."""

from functools import cache
from random import Random

from fleet.pocket.corpus import words

MIN_LETTERS, MAX_LETTERS = 3, 9


@cache
def _real() -> tuple[str, ...]:
    lists = (words.COLOURS, words.OBJECTS, words.PLACES, words.ANIMALS, words.FOODS, words.NAMES, words.CITIES, words.OTHERS)
    return tuple(sorted({word for each in lists for word in each}))


def invented(rng: Random) -> str:
    """No word of `words`."""
    while True:
        head, tail = rng.choice(_real()), rng.choice(_real())
        word = head[: rng.randint(1, len(head) - 1)] + tail[-rng.randint(1, len(tail) - 1) :]
        if MIN_LETTERS <= len(word) <= MAX_LETTERS and word not in _real():
            return word


def nonsense(rng: Random, max_words: int) -> str:
    """At least two words, one of them invented."""
    said = [rng.choice(_real()) if rng.random() < 0.6 else invented(rng) for _ in range(rng.randint(1, max_words - 1))]
    said.insert(rng.randint(0, len(said)), invented(rng))
    return " ".join(said)
