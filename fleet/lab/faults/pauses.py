"""Pauses that clients saw after faults: of each request, and by kind of fault. Pure; nothing is
subtracted.
"""

from collections.abc import Callable, Collection, Sequence

import msgspec

from fleet.lab.faults.answer import longest_gap_s
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.load import Outcome
from fleet.lab.faults.schedule import CONDUCTOR, REDIS
from fleet.lab.report.stats import Summary, summarise

IN_FLIGHT_S = 1.0
"""Chunks produced before the fault and received after it can hide the pause for so long at most."""


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses of some requests, each counted once.

    Units: seconds; the longest gap between two chunks, the wait for the first, and the stalls of
    playback.
    """

    gap_s: Summary | None
    first_s: Summary | None
    stalled_s: Summary | None


class FaultGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Faults with a common property, and the pauses of the requests they affected. `role`,
    `signal`: "" where they differ.

    `detected`: as in `Recovery`. `alone`: the target was its role's only worker without a standby,
    so that the pause includes the loading of another. `affected`: requests of whose tasks the
    target owned one, for a conductor and for Redis all open ones; each counts once per fault.
    Units: seconds. `pause_s`: the longest gap between two chunks that was open between the fault
    and `IN_FLIGHT_S` after the last of the target's tasks was claimed again. `gap_s`: the longest
    one until the next fault, including the load of starting another worker. The others count from
    the fault, as in `Recovery`.
    """

    role: str
    signal: str
    detected: str
    alone: bool
    faults: int
    affected: int
    pause_s: Summary | None
    gap_s: Summary | None
    fenced_s: Summary | None
    claimed_s: Summary | None
    joined_s: Summary | None


def is_open_during(outcome: Outcome, fault: InjectedFault) -> bool:
    return outcome.sent_s <= fault.until_s and outcome.ended_s >= fault.at_s


def is_affected(outcome: Outcome, fault: InjectedFault) -> bool:
    """Return True if the fault hit a worker or the gateway of this request, or a conductor or Redis
    while it was open.
    """
    return (
        is_open_during(outcome, fault)
        if fault.role in (CONDUCTOR, REDIS)
        else outcome.id in fault.requests
    )


def pauses_of(outcomes: Sequence[Outcome]) -> Pauses:
    return Pauses(
        gap_s=summarise([longest_gap_s(outcome.chunks_s) for outcome in outcomes]),
        first_s=summarise(
            [outcome.chunks_s[0] if outcome.chunks_s else None for outcome in outcomes]
        ),
        stalled_s=summarise([outcome.stalled_s for outcome in outcomes]),
    )


def longest_gap_within_s(outcome: Outcome, from_s: float, to_s: float) -> float | None:
    """Return the longest gap that began before `to_s` and ended after `from_s`; None without
    one.
    """
    return longest_gap_s([outcome.sent_s + chunk_s for chunk_s in outcome.chunks_s], from_s, to_s)


def _continued_s(fault: InjectedFault) -> float:
    """Return when the lost tasks ran again and chunks in flight had arrived, as far as it is
    recorded.
    """
    recovery = fault.recovery
    known_s = max(
        (at_s for at_s in (recovery.fenced_s, recovery.claimed_s) if at_s is not None), default=0.0
    )
    return max(fault.until_s, fault.at_s + known_s) + IN_FLIGHT_S


def by_kind(
    outcomes: Sequence[Outcome], faults: Sequence[InjectedFault], alone: Collection[str]
) -> tuple[FaultGroup, ...]:
    """Group by role and signal, in order of the first fault. `alone`: roles with a single
    worker.
    """
    return _grouped(
        outcomes,
        faults,
        alone,
        lambda fault: (fault.role, fault.signal, fault.recovery.detected, fault.role in alone),
    )


def by_detection(
    outcomes: Sequence[Outcome], faults: Sequence[InjectedFault], alone: Collection[str]
) -> tuple[FaultGroup, ...]:
    """Group by the way in which the loss was detected."""
    detected = [fault for fault in faults if fault.recovery.detected]
    return _grouped(
        outcomes,
        detected,
        alone,
        lambda fault: ("", "", fault.recovery.detected, fault.role in alone),
    )


def _grouped(
    outcomes: Sequence[Outcome],
    faults: Sequence[InjectedFault],
    alone: Collection[str],
    key: Callable[[InjectedFault], tuple[str, str, str, bool]],
) -> tuple[FaultGroup, ...]:
    until_s = [later.at_s for later in faults[1:]] + [float("inf")]
    groups: list[FaultGroup] = []
    for group in dict.fromkeys(key(fault) for fault in faults):
        members = [
            (fault, to_s)
            for fault, to_s in zip(faults, until_s, strict=True)
            if key(fault) == group
        ]
        affected = [
            (one, fault, to_s)
            for fault, to_s in members
            for one in outcomes
            if is_affected(one, fault)
        ]
        recoveries = [fault.recovery for fault, _ in members]
        role, signal, detected, is_alone = group
        groups.append(
            FaultGroup(
                role=role,
                signal=signal,
                detected=detected,
                alone=is_alone,
                faults=len(members),
                affected=len(affected),
                pause_s=summarise(
                    [
                        longest_gap_within_s(one, fault.at_s, _continued_s(fault))
                        for one, fault, _ in affected
                    ]
                ),
                gap_s=summarise(
                    [longest_gap_within_s(one, fault.at_s, to_s) for one, fault, to_s in affected]
                ),
                fenced_s=summarise([recovery.fenced_s for recovery in recoveries]),
                claimed_s=summarise([recovery.claimed_s for recovery in recoveries]),
                joined_s=summarise([recovery.joined_s for recovery in recoveries]),
            )
        )
    return tuple(groups)
