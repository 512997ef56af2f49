"""Which role is struck, how and when: drawn from a seed, so that a run can be repeated. Pure."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

CONDUCTOR, GATEWAY = "conductor", "web"
"""The roles besides those of the graph's stages."""


class How(StrEnum):
    """KILL: SIGKILL. STOP: SIGSTOP until its lease has lapsed and others have its tasks, then SIGCONT. TERM: SIGTERM."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"


HOWS = tuple(How)
SIGNALS = {How.KILL: "SIGKILL", How.STOP: "SIGSTOP", How.TERM: "SIGTERM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One process of `role` is to be struck, `pause_s` seconds after the fleet became whole.

    `in_hand_off`: not before a task is on its way between the halves of the role's stage.
    """

    role: str
    how: How
    pause_s: float
    in_hand_off: bool = False


def draw(
    seed: int, kills: int, roles: Sequence[str], hows: Sequence[How], spacing_s: float, halves: Collection[str] = ()
) -> list[Fault]:
    """Rounds of every role in every way, each round in an order of its own; a pause is a spacing, give or take half.

    `halves`: the roles that serve one half of a split stage; every other blow at each of them waits for a hand-off.
    Invariants: any `len(roles)` blows of a round meet every role once; a whole round every role in every way once.
    """
    rng = random.Random(seed)
    in_hand_off = {role: rng.random() < 0.5 for role in roles if role in halves}
    blows: list[Fault] = []
    while len(blows) < kills:
        # Round by round over the roles, so that even a short run meets each of them; the ways rotate from role to role.
        turns = rng.sample(range(len(hows)), len(hows))
        first = {role: rng.randrange(len(hows)) for role in roles}
        for turn in turns:
            for role in rng.sample(list(roles), len(roles)):
                how = hows[(first[role] + turn) % len(hows)]
                pause_s = spacing_s * rng.uniform(0.5, 1.5)
                blows.append(Fault(role=role, how=how, pause_s=pause_s, in_hand_off=in_hand_off.get(role, False)))
                if role in in_hand_off:
                    in_hand_off[role] = not in_hand_off[role]
    return blows[:kills]
