"""Selection of the held-out questions, without repetition and reproducible by seed."""

from collections.abc import Callable, Iterator
from itertools import islice

from fleet.lab.pocket.corpus import ChatTurn, Dialogue, dialogues, families

_MOST_ROUNDS = 2_000
"""Bound on the search: a family with few held-out questions is exhausted when most of them were
drawn.
"""


def distinct(
    count: int, seed: int, wanted: Callable[[Dialogue], bool] = lambda _: True
) -> list[Dialogue]:
    """Return the first `count` different dialogues that satisfy `wanted`, or all if there are
    fewer.
    """
    return list(islice(_distinct(seed, wanted), count))


def _distinct(seed: int, wanted: Callable[[Dialogue], bool]) -> Iterator[Dialogue]:
    seen: set[tuple[ChatTurn, ...]] = set()
    for dialogue in dialogues("held_out", _MOST_ROUNDS * len(families()), seed):
        if dialogue.turns not in seen and wanted(dialogue):
            seen.add(dialogue.turns)
            yield dialogue
