"""Pauses that clients saw after faults, per request and per kind of fault. Pure; pauses are
reported as measured, with no baseline subtracted.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec

from fleet.lab.faults.answer import longest_gap_s
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.load import Outcome
from fleet.lab.faults.schedule import CLIENTS, CONDUCTOR, REDIS
from fleet.lab.report.stats import Summary, summarise

IN_FLIGHT_S = 1.0
"""Longest delay with which chunks produced before a fault may arrive, and so hide the pause after
it.
"""
GroupKey = tuple[str, str, str, bool]
"""Key of a group of faults: role, signal, detection and `alone`, as in `FaultGroup`."""


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses of several requests, each request counted once.

    Units: seconds. For each request: the longest gap between two chunks, the wait for the first
    chunk, and the stalls of playback.
    """

    gap_s: Summary | None
    first_s: Summary | None
    stalled_s: Summary | None


class FaultGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Faults with a common property, and the pauses of the requests they affected. `role`,
    `signal`: "" if the faults of the group differ in it.

    `detected`: way in which the loss was detected, as in `Recovery`. `alone`: whether the target
    was its role's only worker without a standby, so that the pause includes the loading of another
    worker. `affected`: number of requests that had a task on the target. For a fault in a
    conductor, Redis or clients: number of open requests. A request counts once per fault. Units:
    seconds. `pause_s`: the longest gap between two chunks that was open between the fault and
    `IN_FLIGHT_S` after the last of the target's tasks was claimed again. `gap_s`: the longest gap
    until the next fault, including the load of starting another worker. `fenced_s`, `claimed_s`,
    `joined_s`: since the fault, as in `Recovery`.
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
    """Return True if the fault hit a worker or the gateway of this request, or hit a conductor,
    Redis or other clients while the request was open.
    """
    if fault.role in (CONDUCTOR, REDIS, CLIENTS):
        return is_open_during(outcome, fault)
    return outcome.id in fault.requests


def pauses_of(outcomes: Sequence[Outcome]) -> Pauses:
    first_s = [outcome.chunks_s[0] if outcome.chunks_s else None for outcome in outcomes]
    return Pauses(
        gap_s=summarise([longest_gap_s(outcome.chunks_s) for outcome in outcomes]),
        first_s=summarise(first_s),
        stalled_s=summarise([outcome.stalled_s for outcome in outcomes]),
    )


def longest_gap_within_s(outcome: Outcome, from_s: float, to_s: float) -> float | None:
    """Return the longest gap between chunks that began before `to_s` and ended after `from_s`, both
    since the phase began; None if there is none.
    """
    return longest_gap_s([outcome.sent_s + chunk_s for chunk_s in outcome.chunks_s], from_s, to_s)


def _continued_s(fault: InjectedFault) -> float:
    """Return the time since the phase began at which the lost tasks ran again and chunks in flight
    had arrived. Without a recorded recovery, only the end of the fault counts.
    """
    known_s = max(fault.recovery.fenced_s or 0.0, fault.recovery.claimed_s or 0.0)
    return max(fault.until_s, fault.at_s + known_s) + IN_FLIGHT_S


def group_by_kind(
    outcomes: Sequence[Outcome], faults: Sequence[InjectedFault], alone: Collection[str]
) -> tuple[FaultGroup, ...]:
    """Group the faults by role, signal, detection and whether the role is in `alone`, in order of
    the first fault. `alone`: roles with a single worker and no standby.
    """
    return _grouped(
        outcomes,
        [
            (fault, (fault.role, fault.signal, fault.recovery.detected, fault.role in alone))
            for fault in faults
        ],
    )


def group_by_detection(
    outcomes: Sequence[Outcome], faults: Sequence[InjectedFault], alone: Collection[str]
) -> tuple[FaultGroup, ...]:
    """Group the detected losses by the way of detection and by whether the role is in `alone`.
    `alone`: roles with a single worker and no standby.
    """
    return _grouped(
        outcomes,
        [
            (fault, ("", "", fault.recovery.detected, fault.role in alone))
            for fault in faults
            if fault.recovery.detected
        ],
    )


def _grouped(
    outcomes: Sequence[Outcome], faults: Sequence[tuple[InjectedFault, GroupKey]]
) -> tuple[FaultGroup, ...]:
    groups: defaultdict[GroupKey, list[tuple[InjectedFault, float]]] = defaultdict(list)
    for index, (fault, key) in enumerate(faults):
        later = faults[index + 1 : index + 2]
        groups[key].append((fault, later[0][0].at_s if later else float("inf")))
    return tuple(_group(outcomes, key, members) for key, members in groups.items())


def _group(
    outcomes: Sequence[Outcome], key: GroupKey, members: Sequence[tuple[InjectedFault, float]]
) -> FaultGroup:
    role, signal, detected, alone = key
    affected = [
        (one, fault, to_s) for fault, to_s in members for one in outcomes if is_affected(one, fault)
    ]
    pauses_s = [
        longest_gap_within_s(one, fault.at_s, _continued_s(fault)) for one, fault, _ in affected
    ]
    gaps_s = [longest_gap_within_s(one, fault.at_s, to_s) for one, fault, to_s in affected]
    return FaultGroup(
        role=role,
        signal=signal,
        detected=detected,
        alone=alone,
        faults=len(members),
        affected=len(affected),
        pause_s=summarise(pauses_s),
        gap_s=summarise(gaps_s),
        fenced_s=summarise([fault.recovery.fenced_s for fault, _ in members]),
        claimed_s=summarise([fault.recovery.claimed_s for fault, _ in members]),
        joined_s=summarise([fault.recovery.joined_s for fault, _ in members]),
    )
