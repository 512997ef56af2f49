"""What listeners heard of blows: each one's pause, and pauses by the kind of blow. Pure; subtracts nothing."""

from collections.abc import Callable, Collection, Sequence

import msgspec

from fleet.chaos.answer import longest_gap_s
from fleet.chaos.faults import InjectedFault
from fleet.chaos.load import Outcome
from fleet.chaos.schedule import CONDUCTOR
from fleet.reporting.stats import Summary, summarise

ON_ITS_WAY_S = 1.0
"""What was made before the blow, and is told after it, hides the pause for so long at most."""


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """Over some requests, each counting once.

    Units: seconds; the longest gap between two chunks, the wait for the first, and the silence when played as it comes.
    """

    gap_s: Summary | None
    first_s: Summary | None
    stalled_s: Summary | None


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Blows that have something in common, and what those they struck heard. `role` and `signal` are "" where that is not it.

    `found`: how the fleet learnt of it, as `Aftermath` has it. `alone`: the victim was its role's only worker and none stood
    by, so that the pause holds the loading of another. `struck` are the requests of whose tasks the victim held one, of a
    conductor those under way; each counts once a blow.
    Units: seconds. `pause_s`: the longest gap between two chunks that was open between the blow and `ON_ITS_WAY_S` after the last
    of the victim's tasks was claimed again. `gap_s`: the longest one until the next blow, with all that loading another worker
    does to a machine. The others count from the blow, as in `Aftermath`.
    """

    role: str
    signal: str
    found: str
    alone: bool
    hits: int
    struck: int
    pause_s: Summary | None
    gap_s: Summary | None
    fenced_s: Summary | None
    claimed_s: Summary | None
    joined_s: Summary | None


def is_caught(outcome: Outcome, hit: InjectedFault) -> bool:
    return outcome.sent_s <= hit.until_s and outcome.ended_s >= hit.at_s


def is_struck(outcome: Outcome, hit: InjectedFault) -> bool:
    """Whether the blow took a worker or gateway from this very request."""
    return is_caught(outcome, hit) if hit.role == CONDUCTOR else outcome.id in hit.requests


def pauses(outcomes: Sequence[Outcome]) -> Pauses:
    return Pauses(
        gap_s=summarise([longest_gap_s(outcome.chunks_s) for outcome in outcomes]),
        first_s=summarise([outcome.chunks_s[0] if outcome.chunks_s else None for outcome in outcomes]),
        stalled_s=summarise([outcome.stalled_s for outcome in outcomes]),
    )


def gap_over_s(outcome: Outcome, from_s: float, to_s: float) -> float | None:
    """The longest gap whose later chunk came after `from_s` and whose earlier one before `to_s`; None without one."""
    at_s = [outcome.sent_s + chunk_s for chunk_s in outcome.chunks_s]
    gaps = [later - earlier for earlier, later in zip(at_s, at_s[1:], strict=False) if later > from_s and earlier < to_s]
    return max(gaps, default=None)


def _taken_up_s(hit: InjectedFault) -> float:
    """When what it took away was at work again, and what had been on its way was told; as far as that is known."""
    after = hit.after
    known_s = max((moment_s for moment_s in (after.fenced_s, after.claimed_s) if moment_s is not None), default=0.0)
    return max(hit.until_s, hit.at_s + known_s) + ON_ITS_WAY_S


def by_kind(outcomes: Sequence[Outcome], hits: Sequence[InjectedFault], alone: Collection[str]) -> tuple[Kind, ...]:
    """Each signal at each role, in the order in which they first fell. `alone`: roles that one worker serves."""
    return _grouped(outcomes, hits, alone, lambda hit: (hit.role, hit.signal, hit.after.found, hit.role in alone))


def by_finding(outcomes: Sequence[Outcome], hits: Sequence[InjectedFault], alone: Collection[str]) -> tuple[Kind, ...]:
    """Every way in which the fleet learnt that it was one less."""
    there = [hit for hit in hits if hit.after.found]
    return _grouped(outcomes, there, alone, lambda hit: ("", "", hit.after.found, hit.role in alone))


def _grouped(
    outcomes: Sequence[Outcome],
    hits: Sequence[InjectedFault],
    alone: Collection[str],
    key: Callable[[InjectedFault], tuple[str, str, str, bool]],
) -> tuple[Kind, ...]:
    until_s = [later.at_s for later in hits[1:]] + [float("inf")]
    kinds: list[Kind] = []
    for role, signal, found, by_itself in dict.fromkeys(key(hit) for hit in hits):
        mine = [(hit, to_s) for hit, to_s in zip(hits, until_s, strict=True) if key(hit) == (role, signal, found, by_itself)]
        struck = [(one, hit, to_s) for hit, to_s in mine for one in outcomes if is_struck(one, hit)]
        afters = [hit.after for hit, _ in mine]
        kinds.append(
            Kind(
                role=role, signal=signal, found=found, alone=by_itself, hits=len(mine), struck=len(struck),
                pause_s=summarise([gap_over_s(one, hit.at_s, _taken_up_s(hit)) for one, hit, _ in struck]),
                gap_s=summarise([gap_over_s(one, hit.at_s, to_s) for one, hit, to_s in struck]),
                fenced_s=summarise([after.fenced_s for after in afters]),
                claimed_s=summarise([after.claimed_s for after in afters]),
                joined_s=summarise([after.joined_s for after in afters]),
            )
        )  # fmt: skip
    return tuple(kinds)
