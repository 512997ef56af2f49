"""Word salad: random words, so that speech is learnt for every word after every other, and texts to be said after the user.

A salad begins with a word that no sentence of a table begins with, so the two can never be the same.
"""

from functools import cache
from random import Random
from zlib import crc32

from fleet.pocket.corpus import words
from fleet.pocket.corpus.dialogue import Drawn, Exchange, Split
from fleet.pocket.corpus.families import known_sentences
from fleet.pocket.corpus.invented import nonsense

MAX_REPEATED_WORDS = 5
NONSENSE_SHARE = 0.3
_HELD_OUT_EVERY = 8
SAY_ASKS = ("say {text}", "please say {text}", "repeat after me {text}", "say after me {text}", "can you say {text}")
NEW_SAY_ASKS = ("please repeat after me {text}", "can you repeat after me {text}", "please say after me {text}")


@cache
def vocabulary() -> tuple[str, ...]:
    """Every word of training."""
    told = {word for sentence in known_sentences() for word in sentence.split()}
    asked = {word for ask in SAY_ASKS for word in ask.removesuffix("{text}").split()}
    return tuple(sorted(told | asked | set(words.OTHERS) | set(words.VERBS) | set(words.ADVERBS) | set(words.PREPOSITIONS)))


@cache
def _openers() -> tuple[str, ...]:
    taken = {sentence.split()[0] for sentence in known_sentences()} | {ask.split()[0] for ask in (*SAY_ASKS, *NEW_SAY_ASKS)}
    # One-letter words are what spelling answers with, held-out ones too.
    return tuple(word for word in vocabulary() if word not in taken and len(word) > 1)


def salad(rng: Random, split: Split, min_words: int = 2, max_words: int = 7) -> str:
    """Random words; which salads are held out is a property of their text."""
    while True:
        others = rng.choices(vocabulary(), k=rng.randint(min_words, max_words) - 1)
        if (text := " ".join([rng.choice(_openers()), *others])) and _is_in(split, text):
            return text


def _sentence(rng: Random, split: Split) -> str:
    while True:
        thing, place = rng.choice(words.OBJECTS), rng.choice(words.PLACES)
        text = rng.choice((
            f"the {rng.choice(words.COLOURS)} {thing} is {rng.choice(words.PREPOSITIONS)} the {place}",
            f"{rng.choice(words.NAMES)} {rng.choice(words.VERBS)} the {thing} {rng.choice(words.ADVERBS)}",
            f"we go to the {place} with {rng.choice(words.NAMES)}",
            f"the {rng.choice(words.ANIMALS)} is in the {place}",
        ))  # fmt: skip
        if _is_in(split, text):
            return text


def _is_in(split: Split, text: str) -> bool:
    return (crc32(text.encode()) % _HELD_OUT_EVERY == 0) == (split == "held_out")


def repeat(rng: Random, split: Drawn) -> Exchange:
    """Something to say after the user: of the held-out ones, new phrasings and new texts in equal parts."""
    is_new_text = split == "held_out" and rng.random() < 0.5
    is_new_ask = split == "held_out" and not is_new_text
    of: Split = "held_out" if is_new_text else "train"
    text = _sentence(rng, of) if rng.random() < 0.5 else salad(rng, of, 1, MAX_REPEATED_WORDS)
    if split == "invented" and rng.random() < NONSENSE_SHARE:
        text = nonsense(rng, MAX_REPEATED_WORDS)
    question = rng.choice(NEW_SAY_ASKS if is_new_ask else SAY_ASKS).format(text=text)
    return Exchange(question=question, answer=text, is_new_answer=is_new_text)
