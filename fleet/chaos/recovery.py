"""What a fleet's events say of one blow: when it was found out, and when what its victim held went on elsewhere. Pure."""

from collections.abc import Sequence

import msgspec

from fleet.core.events import AnyEvent, RequestEnded, TaskClaimed, TaskGranted, TaskLost, WorkerJoined, WorkerLeft

Told = tuple[int, AnyEvent]
"""An event, and when it was written: microseconds on Redis's clock."""
BY_WHOM = {"died": "its keeper", "lapsed": "its lease", "left": "its goodbye"}
"""How the fleet learns that it is one less. A keeper is who started the process and sees it die: `fleet up`, or `--keep`."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """`found`: a key of `BY_WHOM`, "" where nobody registered was struck. `requests` are those whose tasks the victim lost.

    Units: seconds after the blow. `fenced_s`: its right ended; `granted_s`, `claimed_s`: the last of its tasks was offered again,
    taken up again; `joined_s`: another of the role was loaded, or it itself came back. None where it did not come to that.
    """

    found: str = ""
    fenced_s: float | None = None
    granted_s: float | None = None
    claimed_s: float | None = None
    joined_s: float | None = None
    requests: tuple[str, ...] = ()


def recovery_of(events: Sequence[Told], victim: str, role: str, blow_us: int) -> Recovery:
    """`events` since the blow, oldest first. `role` as workers register it: "" for a gateway."""

    def after_s(at_us: int | None) -> float | None:
        # An event's stamp is cut to milliseconds.
        return None if at_us is None else max(0, at_us - blow_us) / 1e6

    joined = next((at for at, event in events if isinstance(event, WorkerJoined) and event.role == role), None)
    fenced, found, lost = _fencing(events, victim)
    if fenced is None:
        return Recovery(joined_s=after_s(joined))
    since = [told for told in events if told[0] >= fenced]
    ended = {event.request for _, event in since if isinstance(event, RequestEnded)}
    granted = [_first(since, TaskGranted, task) for task in lost]
    claimed = [_first(since, TaskClaimed, task) for task in lost]
    open_ = [at is None and task.request not in ended for task, at in zip(lost, claimed, strict=True)]
    return Recovery(
        found=found,
        fenced_s=after_s(fenced),
        granted_s=after_s(max((at for at in granted if at is not None), default=None)),
        claimed_s=None if any(open_) else after_s(max((at for at in claimed if at is not None), default=None)),
        joined_s=after_s(joined),
        requests=tuple(dict.fromkeys(task.request for task in lost)),
    )


def _fencing(events: Sequence[Told], victim: str) -> tuple[int | None, str, list[TaskLost]]:
    """(when, how, the tasks lost): one script reports them all, and the worker's end right after them."""
    lost: list[TaskLost] = []
    for at_us, event in events:
        if isinstance(event, TaskLost):
            lost.append(event)
        elif isinstance(event, WorkerLeft) and event.worker == victim:
            return at_us, event.how, lost
        else:
            lost = []
    return None, "", []


def _first(events: Sequence[Told], kind: type[TaskGranted] | type[TaskClaimed], task: TaskLost) -> int | None:
    for at_us, event in events:
        if not isinstance(event, kind):
            continue
        if (event.request, event.stage) == (task.request, task.stage) and event.epoch > task.epoch:
            return at_us
    return None
