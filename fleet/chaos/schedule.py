"""Which role is struck, how and when: drawn from a seed, so that a run can be repeated. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

CONDUCTOR = "conductor"
"""The one role besides the graph's stages."""


class How(StrEnum):
    """KILL: SIGKILL. STOP: SIGSTOP until its lease has lapsed and others have its tasks, then SIGCONT. TERM: SIGTERM."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"


HOWS = tuple(How)
SIGNALS = {How.KILL: "SIGKILL", How.STOP: "SIGSTOP", How.TERM: "SIGTERM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One process of `role` is to be struck, `pause_s` seconds after the fleet became whole."""

    role: str
    how: How
    pause_s: float


def draw(seed: int, kills: int, roles: Sequence[str], hows: Sequence[How], spacing_s: float) -> list[Blow]:
    """Rounds of every role in every way, each round in an order of its own; a pause is a spacing, give or take half.

    Invariants: any `len(roles)` blows of a round meet every role once; a whole round every role in every way once.
    """
    rng = random.Random(seed)
    blows: list[Blow] = []
    while len(blows) < kills:
        # Round by round over the roles, so that even a short run meets each of them; the ways rotate from role to role.
        turns = rng.sample(range(len(hows)), len(hows))
        first = {role: rng.randrange(len(hows)) for role in roles}
        for turn in turns:
            for role in rng.sample(list(roles), len(roles)):
                how = hows[(first[role] + turn) % len(hows)]
                blows.append(Blow(role=role, how=how, pause_s=spacing_s * rng.uniform(0.5, 1.5)))
    return blows[:kills]
