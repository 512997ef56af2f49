"""Recovery from one fault, extracted from the fleet's events: how the loss was detected, and when
the tasks continued elsewhere. Pure.
"""

from collections.abc import Sequence

import msgspec

from fleet.core.events import (
    AnyEvent,
    RequestEnded,
    TaskClaimed,
    TaskGranted,
    TaskLost,
    WorkerJoined,
    WorkerLeft,
)

TimedEvent = tuple[int, AnyEvent]
"""An event and its timestamp: microseconds on Redis's clock."""
DETECTED_BY = {"died": "keeper", "lapsed": "lapsed lease", "left": "leave"}
"""Ways in which the fleet detects a loss, by the event's name. "keeper": the process's keeper
(`fleet up` or `--keep`) saw its exit.
"""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet recovered from one fault. `detected`: a key of `DETECTED_BY`, "" if the target
    was not registered. `requests`: ids of the requests whose tasks the target lost.

    Units: seconds from the fault to an event, None if the event did not happen. `fenced_s`: the
    target lost its rights; `granted_s`, `claimed_s`: the last of its tasks was granted and claimed
    again; `joined_s`: a worker of the role joined.
    """

    detected: str = ""
    fenced_s: float | None = None
    granted_s: float | None = None
    claimed_s: float | None = None
    joined_s: float | None = None
    requests: tuple[str, ...] = ()


def recovery_of(events: Sequence[TimedEvent], target: str, role: str, fault_us: int) -> Recovery:
    """Return the recovery from a fault. `events`: events since the fault, oldest first. `target`:
    id of the process hit. `role`: role for which the target was registered, "" for a gateway.
    `fault_us`: time of the fault on Redis's clock.
    """

    def after_s(at_us: int | None) -> float | None:
        # An event's timestamp is cut to milliseconds.
        return None if at_us is None else max(0, at_us - fault_us) / 1e6

    joined = next(
        (at for at, event in events if isinstance(event, WorkerJoined) and event.role == role), None
    )
    fenced, detected, lost = _fencing(events, target)
    if fenced is None:
        return Recovery(joined_s=after_s(joined))
    ended = {
        event.request for at, event in events if at >= fenced and isinstance(event, RequestEnded)
    }
    granted = [_first(events, TaskGranted, task) for task in lost]
    claimed = [_first(events, TaskClaimed, task) for task in lost]
    unclaimed = [
        at is None and task.request not in ended for task, at in zip(lost, claimed, strict=True)
    ]
    return Recovery(
        detected=detected,
        fenced_s=after_s(fenced),
        granted_s=after_s(max((at for at in granted if at is not None), default=None)),
        claimed_s=None
        if any(unclaimed)
        else after_s(max((at for at in claimed if at is not None), default=None)),
        joined_s=after_s(joined),
        requests=tuple(dict.fromkeys(task.request for task in lost)),
    )


def _fencing(events: Sequence[TimedEvent], target: str) -> tuple[int | None, str, list[TaskLost]]:
    """Return (time, detection, lost tasks) of the target's fencing. A single script writes these
    events: all lost tasks and their new grants, then the end of the worker.
    """
    lost: list[TaskLost] = []
    for at_us, event in events:
        if isinstance(event, TaskLost):
            lost.append(event)
        elif isinstance(event, WorkerLeft) and event.worker == target:
            return at_us, event.how, lost
        elif not isinstance(event, TaskGranted):
            lost = []
    return None, "", []


def _first(
    events: Sequence[TimedEvent], kind: type[TaskGranted] | type[TaskClaimed], task: TaskLost
) -> int | None:
    of_task = (
        (at_us, event)
        for at_us, event in events
        if isinstance(event, kind) and event.request == task.request
    )
    return next(
        (
            at_us
            for at_us, event in of_task
            if event.stage == task.stage and event.epoch > task.epoch
        ),
        None,
    )
