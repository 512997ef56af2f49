"""Which held-out questions are asked: none twice, the same ones for the same seed. Knows no API."""

from collections.abc import Callable, Iterator
from itertools import islice

from fleet.pocket.corpus import ChatTurn, Dialogue, dialogues, families

_MOST_ROUNDS = 2_000
"""Of all families in turn: some have few held-out questions, and run dry when most of theirs were asked."""


def distinct(count: int, seed: int, wanted: Callable[[Dialogue], bool] = lambda _: True) -> list[Dialogue]:
    """The first `count` dialogues that are wanted, or as many as there are."""
    return list(islice(_distinct(seed, wanted), count))


def _distinct(seed: int, wanted: Callable[[Dialogue], bool]) -> Iterator[Dialogue]:
    seen: set[tuple[ChatTurn, ...]] = set()
    for dialogue in dialogues("held_out", _MOST_ROUNDS * len(families()), seed):
        if dialogue.turns not in seen and wanted(dialogue):
            seen.add(dialogue.turns)
            yield dialogue
