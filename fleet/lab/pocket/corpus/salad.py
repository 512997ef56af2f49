"""Word salad, which trains speech on any word after any other, and requests to repeat a text after
the user.

A salad starts with a word that no sentence of a table starts with, so that it never equals one.
"""

from functools import cache
from random import Random
from zlib import crc32

from fleet.lab.pocket.corpus.dialogue import Drawn, Exchange, Split
from fleet.lab.pocket.corpus.families import known_sentences
from fleet.lab.pocket.corpus.memory import Phrasings
from fleet.lab.pocket.corpus.words import WORDS, nonsense, read_data

MAX_REPEATED_WORDS = 5
NONSENSE_SHARE = 0.3
_HELD_OUT_EVERY = 8
_REPEAT = read_data("memory")["repeat"]
REPEAT_ORDERS = Phrasings(asks=_REPEAT["asks"], new_asks=_REPEAT["new_asks"])
_SLOTS = {
    "thing": "objects",
    "place": "places",
    "colour": "colours",
    "preposition": "prepositions",
    "name": "names",
    "verb": "verbs",
    "adverb": "adverbs",
    "friend": "names",
    "animal": "animals",
}
"""Slots of the sentences to repeat, in the order in which they are filled, with their word
lists.
"""


@cache
def vocabulary() -> tuple[str, ...]:
    """Return every word that occurs in the training split."""
    orders = [order.removesuffix("{text}") for order in REPEAT_ORDERS.asks]
    found = {word for sentence in (*known_sentences(), *orders) for word in sentence.split()}
    return tuple(
        sorted(
            found.union(*(WORDS[name] for name in ("others", "verbs", "adverbs", "prepositions")))
        )
    )


@cache
def _openers() -> tuple[str, ...]:
    known = {
        sentence.split()[0]
        for sentence in (*known_sentences(), *REPEAT_ORDERS.asks, *REPEAT_ORDERS.new_asks)
    }
    # Answers to spelling questions start with one-letter words, also in the held-out split.
    return tuple(word for word in vocabulary() if word not in known and len(word) > 1)


def salad(rng: Random, split: Split, min_words: int = 2, max_words: int = 7) -> str:
    """Generate a sentence of random words. Sentences are drawn until a hash of the text assigns one
    to `split`.
    """
    while True:
        others = rng.choices(vocabulary(), k=rng.randint(min_words, max_words) - 1)
        if (text := " ".join([rng.choice(_openers()), *others])) and _is_in(split, text):
            return text


def _sentence(rng: Random, split: Split) -> str:
    while True:
        row = {slot: rng.choice(WORDS[name]) for slot, name in _SLOTS.items()}
        text = rng.choice(_REPEAT["sentences"]).format_map(row)
        if _is_in(split, text):
            return text


def _is_in(split: Split, text: str) -> bool:
    return (crc32(text.encode()) % _HELD_OUT_EVERY == 0) == (split == "held_out")


def repeat(rng: Random, split: Drawn) -> Exchange:
    """Generate a request to repeat a text. In the held-out split, half of the requests have a new
    phrasing and half a new text.
    """
    is_new_text = split == "held_out" and rng.random() < 0.5
    text_split: Split = "held_out" if is_new_text else "train"
    text = (
        _sentence(rng, text_split)
        if rng.random() < 0.5
        else salad(rng, text_split, 1, MAX_REPEATED_WORDS)
    )
    if split == "invented" and rng.random() < NONSENSE_SHARE:
        text = nonsense(rng, MAX_REPEATED_WORDS)
    question = REPEAT_ORDERS.draw(rng, "train" if is_new_text else split).format(text=text)
    return Exchange(question=question, answer=text, is_new_answer=is_new_text)
