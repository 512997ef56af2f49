"""Incidents: episodes of trouble in the journal, each from its first trouble until ten quiet
minutes have followed the last one. Pure.

Units: `*_us` are microseconds since 1970 on Redis's clock. Knows no Redis, no HTTP and no clock.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.telemetry.condition import (
    DEATHS,
    QUIET_S,
    TROUBLES,
    ConditionPart,
    Level,
    duration,
    refusals_of,
    tell,
)
from fleet.telemetry.journal import JournalEntry

GAP_US = QUIET_S * 1_000_000
"""Microseconds. Troubles that are less than this apart belong to one incident, which is over when
this time has passed without a trouble. The Now page calls the fleet well again after the same time.
"""
_ID = "%Y%m%dT%H%M%SZ"
AlertEvent = Literal["opened", "worse", "ended"]
ALERT_EVENTS: tuple[AlertEvent, ...] = ("opened", "worse", "ended")
AlertState = Literal["sending", "sent", "failed"]


class RoleOutage(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a role had no worker that accepts tasks. `end_us`: 0 while it lasts.
    `worker`: the role's last worker. `refuses`: True if requests were refused meanwhile: an
    operator ordered the last worker to drain or stop, or no other one came in time.
    """

    role: RoleName
    begin_us: int
    end_us: int = 0
    worker: WorkerId = WorkerId("")
    refuses: bool = False


class AffectedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that an incident touched. `state`: continued, open (its task is lost and not yet
    claimed again), failed, or lost (failed after the loss of a task). `at_us`, `stage`: time and
    stage of the first such event. `pause_us`: longest pause of a task. `lost_with`: worker with
    which a task was last lost. `recovered_by`: worker that last claimed a lost task. `code`: error
    code of a failure. A field without a value is "" or 0.
    """

    request: RequestId
    state: str
    at_us: int
    stage: StageName = StageName("")
    pause_us: int = 0
    lost_with: WorkerId = WorkerId("")
    recovered_by: WorkerId = WorkerId("")
    code: str = ""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident. `id`: time of its first trouble, to the second. `end_us`: time of the last
    trouble; None while the incident goes on. `last_us`: time of the last trouble so far. `level`:
    down if requests were refused for lack of a worker, else degraded. `parts`: what its sentence
    says, in order. `roles`: roles whose workers died, or that had no worker. `refused`: refused
    requests by error code. `begins_earlier`: True if the journal begins so shortly before the
    incident that earlier troubles of it may be unknown.
    """

    id: str
    begin_us: int
    last_us: int
    end_us: int | None
    level: Level
    parts: tuple[ConditionPart, ...]
    roles: tuple[str, ...] = ()
    outages: tuple[RoleOutage, ...] = ()
    answers: tuple[AffectedAnswer, ...] = ()
    deaths: tuple[JournalEntry, ...] = ()
    refused: Mapping[str, int] = {}
    begins_earlier: bool = False

    @property
    def is_open(self) -> bool:
        return self.end_us is None

    def has(self, at_us: int) -> bool:
        """Return True if a time is within the incident. The time may have been cut to a whole
        second.
        """
        return self.begin_us - 1_000_000 < at_us <= self.last_us


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A message about an incident to another system. `level`: level of the incident at that time.
    `gateway`: gateway that sends the message. `at_us`: time at which this gateway took the message
    on; once `state` is sent or failed, the time of that end. `detail`: why sending failed.
    """

    event: AlertEvent
    level: Level
    gateway: WorkerId
    at_us: int
    state: AlertState = "sending"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalView:
    """Input of `find_incidents`. `entries`: the journal from `from_us` on, oldest first. `needed`:
    roles that answers need. `patience_us`: how long requests wait for a role that lost its last
    worker.
    """

    entries: Sequence[JournalEntry]
    now_us: int
    from_us: int = 0
    needed: Collection[RoleName] = ()
    patience_us: int = 30_000_000


def id_of(at_us: int) -> str:
    """Return the id of an incident that began at this time."""
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).strftime(_ID)


def time_of(incident: str) -> int | None:
    """Return the time in the id of an incident; None if `incident` is not such an id."""
    try:
        moment = datetime.strptime(incident, _ID).replace(tzinfo=UTC)
    except ValueError:
        return None
    return round(moment.timestamp()) * 1_000_000


def sentence_of(incident: Incident) -> str:
    """Return the incident's sentence as plain text, with times in UTC."""
    level = "Down" if incident.level == "down" else "Degraded"
    until = f" until {utc(incident.end_us)}" if incident.end_us is not None else ""
    parts = [
        f"{part.text} {utc(part.at_us)}" if part.at_us else part.text for part in incident.parts
    ]
    return f"{level} since {utc(incident.begin_us)}{until}: {'; '.join(parts)}."


def utc(at_us: int) -> str:
    """Format a time in UTC to the second, such as 2026-11-30T03:12:04Z."""
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_incidents(seen: JournalView) -> list[Incident]:
    """Return the incidents in the journal, newest first."""
    outages = _outages(seen)
    return [_build(seen, outages, *times) for times in _episodes(seen, outages)][::-1]


def _outages(seen: JournalView) -> list[RoleOutage]:
    """Return the outages of needed roles, in the order in which they began."""
    found: list[RoleOutage] = []
    begun: dict[str, JournalEntry] = {}
    for entry in seen.entries:
        if entry.role not in seen.needed:
            continue
        serves = entry.what == "joined" and entry.detail != "standby"
        if serves or (entry.what == "ordered" and entry.detail == "resume"):
            if (first := begun.pop(entry.role, None)) is not None:
                found.append(_outage(seen, first, entry.at_us))
        elif entry.serving == 0:
            begun.setdefault(entry.role, entry)
    found += [_outage(seen, first, 0) for first in begun.values()]
    return sorted(found, key=lambda outage: outage.begin_us)


def _outage(seen: JournalView, first: JournalEntry, end_us: int) -> RoleOutage:
    lasted_us = (end_us or seen.now_us) - first.at_us
    return RoleOutage(
        role=RoleName(first.role),
        begin_us=first.at_us,
        end_us=end_us,
        worker=first.worker,
        refuses=first.what == "ordered" or lasted_us > seen.patience_us,
    )


def _episodes(seen: JournalView, outages: Sequence[RoleOutage]) -> Iterator[tuple[int, int]]:
    """Yield begin and last trouble of each episode, oldest first."""
    kinds = (*TROUBLES, "lost", "recovered")
    times = [(entry.at_us, entry.at_us) for entry in seen.entries if entry.what in kinds]
    times += [(outage.begin_us, outage.end_us or seen.now_us) for outage in outages]
    if not times:
        return
    begin, last = min(times)
    for at, end in sorted(times):
        if at - last >= GAP_US:
            yield begin, last
            begin = at
        last = max(last, end)
    yield begin, last


def _build(seen: JournalView, outages: Sequence[RoleOutage], begin: int, last: int) -> Incident:
    of_it = [outage for outage in outages if begin <= outage.begin_us <= last]
    entries = [entry for entry in seen.entries if begin <= entry.at_us <= last]
    deaths = tuple(entry for entry in entries if entry.what in DEATHS)
    refusing = [outage for outage in of_it if outage.refuses]
    begins_earlier = 0 < begin - GAP_US < seen.from_us
    limit = ConditionPart(text="events are known since", at_us=seen.from_us)
    is_open = seen.now_us - last < GAP_US
    return Incident(
        id=id_of(begin),
        begin_us=begin,
        last_us=last,
        end_us=None if is_open else last,
        level="down" if refusing else "degraded",
        parts=(
            *(_told(outage) for outage in of_it),
            *tell(entries),
            *([limit] if begins_earlier else []),
        ),
        roles=tuple(
            dict.fromkeys([*(outage.role for outage in of_it), *(e.role for e in deaths if e.role)])
        ),
        outages=tuple(of_it),
        answers=tuple(_answers(entries)),
        deaths=deaths,
        refused=dict(refusals_of(entries)),
        begins_earlier=begins_earlier,
    )


def _told(outage: RoleOutage) -> ConditionPart:
    waiting = (
        "requests that needed it were refused" if outage.refuses else "requests waited for one"
    )
    time = f"for {duration(outage.end_us - outage.begin_us)} from" if outage.end_us else "since"
    return ConditionPart(
        text=f"no worker of {outage.role} accepted tasks, and {waiting}, {time}",
        at_us=outage.begin_us,
        worker=outage.worker,
    )


def _answers(entries: Sequence[JournalEntry]) -> Iterator[AffectedAnswer]:
    """Yield the affected answers in the order in which they were first touched."""
    by_request: dict[RequestId, list[JournalEntry]] = {}
    for entry in entries:
        if entry.request and entry.what in ("lost", "recovered", "failed"):
            by_request.setdefault(entry.request, []).append(entry)
    for request, touched in by_request.items():
        lost, recovered, failed = (
            [entry for entry in touched if entry.what == what]
            for what in ("lost", "recovered", "failed")
        )
        if failed:
            state = "lost" if lost else "failed"
        else:
            state = "continued" if touched[-1].what == "recovered" else "open"
        yield AffectedAnswer(
            request=request,
            state=state,
            at_us=touched[0].at_us,
            stage=touched[0].stage,
            pause_us=max((entry.pause_us for entry in recovered), default=0),
            lost_with=lost[-1].worker if lost else WorkerId(""),
            recovered_by=recovered[-1].worker if recovered else WorkerId(""),
            code=failed[-1].code if failed else "",
        )
