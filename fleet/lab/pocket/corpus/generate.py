"""Random streams of dialogues and sentences over all families, reproducible by seed."""

from collections.abc import Iterator
from itertools import islice
from random import Random

from fleet.lab.pocket.corpus import memory
from fleet.lab.pocket.corpus.dialogue import ChatTurn, Dialogue, Drawn, Exchange, Split
from fleet.lab.pocket.corpus.families import TABLES
from fleet.lab.pocket.corpus.salad import repeat, salad

SALAD_SHARE = 0.4
REPEAT, MEMORY = "repeat", "memory"
NUM_BEFORE = (0, 0, 0, 1, 1, 2)
"""Possible numbers of exchanges from other families before a question; one is chosen at random."""


def families() -> tuple[str, ...]:
    return (*TABLES, REPEAT, MEMORY)


def dialogues(split: Drawn, count: int, seed: int) -> Iterator[Dialogue]:
    """Yield `count` dialogues with one or more exchanges, every family equally often.

    Invariants: with the same seed, a smaller `count` yields a prefix of a larger one; no user's
    utterance of the held-out split is in the training split.
    """
    for family, exchanges in islice(_conversations(split, seed), count):
        spoken = [
            (
                ChatTurn(role="user", text=each.question),
                ChatTurn(role="assistant", text=each.answer),
            )
            for each in exchanges
        ]
        yield Dialogue(turns=tuple(turn for pair in spoken for turn in pair), family=family)


def sentences(split: Split, count: int, seed: int) -> Iterator[str]:
    """Yield `count` sentences for the training of speech: both sides of dialogues, and word salad.
    A sentence may be repeated.

    Invariants: no held-out sentence is in the training split.
    """
    rng = Random(f"sentences {split} {seed}")
    conversations = _conversations(split, seed)
    for _ in range(count):
        if rng.random() < SALAD_SHARE:
            yield salad(rng, split)
            continue
        exchange = rng.choice(next(conversations)[1])
        may_answer = split == "train" or exchange.is_new_answer
        yield exchange.answer if may_answer and rng.random() < 0.5 else exchange.question


def _conversations(split: Drawn, seed: int) -> Iterator[tuple[str, list[Exchange]]]:
    rng = Random(f"dialogues {split} {seed}")
    while True:
        for family in rng.sample(families(), len(families())):
            yield family, _conversation(rng, split, family)


def _conversation(rng: Random, split: Drawn, family: str) -> list[Exchange]:
    def filler() -> Exchange:
        return _exchange(rng, split, rng.choice((*TABLES, REPEAT)))

    if family == MEMORY:
        return memory.converse(rng, split, filler)
    return [*(filler() for _ in range(rng.choice(NUM_BEFORE))), _exchange(rng, split, family)]


def _exchange(rng: Random, split: Drawn, family: str) -> Exchange:
    return repeat(rng, split) if family == REPEAT else rng.choice(TABLES[family]).draw(rng, split)
