"""Reader of the corpus's data files, word lists that its families share, and invented words. An
invented word joins the beginning of one word to the end of another, so that neither part predicts
the other.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml


def read_data(name: str) -> Any:
    """Return the parsed content of the corpus's data file `data/NAME.yaml`."""
    return yaml.safe_load(
        (Path(__file__).parent / "data" / f"{name}.yaml").read_text(encoding="utf-8")
    )


WORDS: Mapping[str, list[str]] = {name: text.split() for name, text in read_data("words").items()}


MIN_LETTERS, MAX_LETTERS = 3, 9


@cache
def _real() -> tuple[str, ...]:
    lists = ("colours", "objects", "places", "animals", "foods", "names", "cities", "others")
    return tuple(sorted({word for name in lists for word in WORDS[name]}))


def invented(rng: Random) -> str:
    """Return a random word that is in none of the word lists."""
    while True:
        head, tail = rng.choice(_real()), rng.choice(_real())
        word = head[: rng.randint(1, len(head) - 1)] + tail[-rng.randint(1, len(tail) - 1) :]
        if MIN_LETTERS <= len(word) <= MAX_LETTERS and word not in _real():
            return word


def nonsense(rng: Random, max_words: int) -> str:
    """Return a text of 2 to `max_words` words, at least one of which is invented."""
    text = [
        rng.choice(_real()) if rng.random() < 0.6 else invented(rng)
        for _ in range(rng.randint(1, max_words - 1))
    ]
    text.insert(rng.randint(0, len(text)), invented(rng))
    return " ".join(text)
