"""The condition of a fleet in one sentence: whether it admits requests, what is missing, and what
happened within the last hour. Pure.

Units: `*_us` are microseconds since 1970 on Redis's clock. Knows no Redis, no HTTP and no clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fleet.core.ids import RequestId, RoleName, WorkerId
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import (
    SERIES_KEPT_S,
    SERIES_STEP_S,
    RoleView,
    SeriesPoint,
    WorkerView,
)

Level = Literal["ok", "degraded", "down"]
QUIET_S = 600
"""Seconds without a death, refusal or failure after which a fleet with all its workers is `ok`
again. Ten minutes are enough for a worker that dies while it loads, or over one request, to die
again, and for a person on call to open the page.
"""
FULL_HOUR_S = SERIES_KEPT_S - 60
"""Least number of seconds that records must cover for the last hour to count as known."""
DEATHS = ("died", "lapsed")
TROUBLES = (*DEATHS, "failed", "refused")


class ConditionPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the sentence: `text`, followed by the time `at_us` unless that is 0. `worker`,
    `request`: process or request to which the console links the part; "" for none.
    """

    text: str
    at_us: int = 0
    worker: WorkerId = WorkerId("")
    request: RequestId = RequestId("")


class FleetCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Condition of a fleet. `level`: down if requests are refused because something is missing,
    degraded if something is missing or went wrong a short time ago. `since_us`: begin of the
    trouble, 0 if unknown. `parts`: what the sentence says, in order.
    """

    level: Level
    since_us: int = 0
    parts: tuple[ConditionPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the fleet's condition is concluded from.

    `roles`: present roles. `wanted`: workers that should accept tasks, by role. `missing`: roles
    that answers need and that have no worker that accepts tasks. `redis_trouble`: why Redis admits
    no requests, "" if it does. `num_live` of at most `max_live` requests are live, and
    `num_waiting` of at most `max_waiting` wait at this gateway. `entries`: the journal from
    `journal_from_us` on, oldest first; `points`: the time series of the last hour.
    """

    now_us: int
    roles: Sequence[RoleView] = ()
    workers: Sequence[WorkerView] = ()
    wanted: Mapping[RoleName, int] = field(default_factory=dict[RoleName, int])
    missing: Sequence[RoleName] = ()
    redis_trouble: str = ""
    num_live: int = 0
    max_live: int = 0
    num_waiting: int = 0
    max_waiting: int = 0
    entries: Sequence[JournalEntry] = ()
    journal_from_us: int = 0
    points: Sequence[SeriesPoint] = ()

    @property
    def hour_us(self) -> int:
        return self.now_us - SERIES_KEPT_S * 1_000_000

    @property
    def counted_from_us(self) -> int:
        """Time from which on requests were counted: the first of `points` with a gauge or a count,
        since a step that no process recorded has neither; `now_us` if no step has any.
        """
        known = (
            point.at_us
            for point in self.points
            if point.running or point.waiting or point.submitted or point.ended or point.refused
        )
        return next(known, self.now_us)

    def covers_the_hour(self, from_us: int) -> bool:
        """Return True if records that begin at `from_us` cover nearly the whole last hour."""
        return self.now_us - from_us >= FULL_HOUR_S * 1_000_000


def judge(seen: Evidence) -> FleetCondition:
    """Return the condition of the fleet. The gateway's own reasons to refuse a request come first,
    in its order: Redis, a role without a worker, the limits of live and waiting requests.
    """
    if seen.redis_trouble:
        return FleetCondition(level="down", parts=(ConditionPart(text=seen.redis_trouble),))
    refusing, gaps = missing_parts(seen)
    parts = [*refusing, *gaps, *_full(seen), *_below(seen)]
    recent = _begin_of_recent_trouble(seen)
    happened = _happened(seen)
    if refusing:
        since = max((_lost_us(seen, role) for role in seen.missing), default=0)
        return FleetCondition(level="down", since_us=since, parts=(*parts, *happened))
    if parts or recent:
        lost = [_lost_us(seen, role) for role in seen.missing or _short_roles(seen)]
        times = [at for at in (recent, *lost) if at]
        return FleetCondition(
            level="degraded", since_us=min(times, default=0), parts=(*parts, *happened)
        )
    return FleetCondition(level="ok", parts=(*_calm(seen), *happened))


def states_of(role: RoleName, workers: Sequence[WorkerView], view: RoleView | None) -> str:
    """Describe the workers of a role that accept no tasks, such as "1 draining"; "" if there is
    none.
    """
    states = [worker.state for worker in workers if worker.role == role and not worker.gone]
    loaded = (
        f", {view.loaded_percent} % loaded"
        if view is not None and view.loaded_percent is not None
        else ""
    )
    counts = {
        f"starting{loaded}": view.starting if view is not None else 0,
        "standing by": states.count("standby"),
        "draining": states.count("draining"),
        "leaving": states.count("leaving"),
        "not renewing its lease": states.count("late"),
    }
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def is_replaced(role: RoleName, workers: Sequence[WorkerView], view: RoleView | None) -> bool:
    """Return True if a starting or standby worker of the role will accept tasks without an
    operator's help.
    """
    starts = view is not None and view.starting > 0
    return starts or any(worker.role == role and worker.state == "standby" for worker in workers)


def _role(seen: Evidence, name: RoleName) -> RoleView | None:
    return next((role for role in seen.roles if role.role == name), None)


def missing_parts(seen: Evidence) -> tuple[list[ConditionPart], list[ConditionPart]]:
    """Return the parts about missing roles: first about roles whose requests are refused, then
    about roles whose requests wait for a worker.
    """
    refusing: list[ConditionPart] = []
    waiting: list[ConditionPart] = []
    for name in seen.missing:
        view = _role(seen, name)
        states = states_of(name, seen.workers, view) or (view.gap if view is not None else "")
        note = f" ({states})" if states else ""
        if view is not None and (view.admits or view.starting):
            waiting.append(
                ConditionPart(text=f"{name} has no worker now{note}; requests wait for one")
            )
        else:
            text = f"no worker of {name} accepts tasks{note}; requests that need it are refused"
            refusing.append(ConditionPart(text=text))
    return refusing, waiting


def _full(seen: Evidence) -> list[ConditionPart]:
    """Return the part that says that no place is free for another request; empty if one is free."""
    if not 0 < seen.max_live <= seen.num_live or seen.num_waiting < seen.max_waiting:
        return []
    waiting = f" and {seen.num_waiting} wait here" if seen.num_waiting else ""
    text = f"no place is free: {seen.num_live} requests are live{waiting}; further ones are refused"
    return [ConditionPart(text=text)]


def _serving(seen: Evidence, role: RoleName) -> int:
    return sum(view.role == role and view.takes_tasks and not view.gone for view in seen.workers)


def _short_roles(seen: Evidence) -> list[RoleName]:
    """Return the roles that have fewer workers that accept tasks than are wanted, but are not
    missing.
    """
    return [
        role
        for role, wanted in seen.wanted.items()
        if role not in seen.missing and _serving(seen, role) < wanted
    ]


def _below(seen: Evidence) -> list[ConditionPart]:
    parts: list[ConditionPart] = []
    for name in _short_roles(seen):
        states = states_of(name, seen.workers, _role(seen, name))
        note = f" ({states})" if states else ""
        text = f"{name} has {_serving(seen, name)} of {seen.wanted[name]} workers{note}"
        parts.append(ConditionPart(text=text))
    return parts


def _lost_us(seen: Evidence, role: RoleName) -> int:
    """Return the time at which the role last lost a worker, a worker of the role last began to
    leave, or an operator last ordered anything but a resumption; 0 if the journal does not say.
    """
    causes = (*DEATHS, "left", "ordered", "leaving")
    lost = (e for e in seen.entries if e.role == role and e.what in causes and e.detail != "resume")
    return max((entry.at_us for entry in lost), default=0)


def _begin_of_recent_trouble(seen: Evidence) -> int:
    """Return the time of the first trouble of an unbroken series that reaches into the last
    `QUIET_S` seconds; 0 if they were quiet.
    """
    steps = (
        point.at_us
        for point in seen.points
        if sum(point.refused.values()) or point.ended.get("failed", 0)
    )
    logged = (entry.at_us for entry in seen.entries if entry.what in TROUBLES)
    begin, later = 0, seen.now_us
    for at in sorted((at for at in (*steps, *logged) if at >= seen.hour_us), reverse=True):
        if later - at > QUIET_S * 1_000_000:
            break
        begin = later = at
    return begin


def _happened(seen: Evidence) -> list[ConditionPart]:
    """Return the parts about deaths, continued answers, failures and refusals of the last hour."""
    entries = [entry for entry in seen.entries if entry.at_us >= seen.hour_us]
    return [*tell(entries, seen.points), *_limits_of_knowledge(seen)]


def tell(
    entries: Sequence[JournalEntry], points: Sequence[SeriesPoint] = ()
) -> list[ConditionPart]:
    """Return the parts about the deaths, continued answers, failures and refusals among `entries`,
    oldest first. `points`: time series of the same period; of the two counts of failures or
    refusals, the higher one is reported.
    """
    return [*_deaths(entries), *_answers(points, entries), *_refusals(points, entries)]


def _limits_of_knowledge(seen: Evidence) -> list[ConditionPart]:
    """Return the parts that say since when the journal and the counts are known, if they do not
    reach back for an hour.
    """
    parts: list[ConditionPart] = []
    if not seen.covers_the_hour(seen.counted_from_us):
        parts.append(_since("answers are counted", seen.counted_from_us, seen.now_us))
    if not seen.covers_the_hour(seen.journal_from_us):
        parts.append(_since("events are known", seen.journal_from_us, seen.now_us))
    return parts


def _since(text: str, at_us: int, now_us: int) -> ConditionPart:
    """Return a part that ends with a time. A time within the present step is not shown, as it would
    change at every reading.
    """
    if now_us - at_us < SERIES_STEP_S * 1_000_000:
        return ConditionPart(text=f"{text} from now on")
    return ConditionPart(text=f"{text} since", at_us=at_us)


def _deaths(entries: Sequence[JournalEntry]) -> list[ConditionPart]:
    by_role: dict[str, dict[str, JournalEntry]] = {}
    for entry in entries:
        if entry.what in DEATHS:
            # a process may lapse first, and its keeper sees the end later
            by_role.setdefault(entry.role, {})[entry.worker or entry.id] = entry
    parts: list[ConditionPart] = []
    for role, ends in by_role.items():
        newest = max(ends.values(), key=lambda entry: entry.at_us)
        cause = f" ({newest.detail})" if newest.detail else ""
        name = role or "a gateway"
        text = (
            f"{name} died{cause} at"
            if len(ends) == 1
            else f"{name} died {len(ends)} times, the last time{cause} at"
        )
        parts.append(ConditionPart(text=text, at_us=newest.at_us, worker=newest.worker))
    return parts


def _answers(points: Sequence[SeriesPoint], entries: Sequence[JournalEntry]) -> list[ConditionPart]:
    """Return the parts about answers whose worker was lost, and about failed answers. `lost` of a
    task is followed by `recovered`, or by `failed` of its request.
    """
    lost = {entry.request: entry.at_us for entry in entries if entry.what == "lost"}
    pauses = [entry for entry in entries if entry.what == "recovered"]
    failed = {entry.request: entry for entry in entries if entry.what == "failed"}
    continued = {entry.request for entry in pauses}
    parts: list[ConditionPart] = []
    if continued:
        longest = max(pauses, key=lambda entry: entry.pause_us)
        parts.append(
            ConditionPart(
                text=f"{_answers_word(len(continued))} paused, longest "
                f"{duration(longest.pause_us)}",
                request=longest.request,
            )
        )
    gone = [failed[request] for request in lost if request in failed]
    open_ = [request for request in lost if request not in failed and request not in continued]
    if gone:
        parts.append(ConditionPart(text=f"{len(gone)} lost", request=gone[-1].request))
    if open_:
        parts.append(
            ConditionPart(text=f"{_answers_word(len(open_))} not continued", request=open_[-1])
        )
    if lost and not gone and not open_:
        parts.append(ConditionPart(text="none lost"))
    num_failed = max(len(failed), sum(p.ended.get("failed", 0) for p in points)) - len(gone)
    if num_failed > 0:
        newest = next((e.request for e in reversed(entries) if e.what == "failed"), RequestId(""))
        parts.append(ConditionPart(text=f"{_number(num_failed)} failed", request=newest))
    return parts


def _refusals(
    points: Sequence[SeriesPoint], entries: Sequence[JournalEntry]
) -> list[ConditionPart]:
    counted, logged = _refused(points), refusals_of(entries)
    refused = {code: max(counted[code], logged[code]) for code in {**counted, **logged}}
    total = sum(refused.values())
    if not total:
        return []
    return [ConditionPart(text=f"{_number(total)} refused ({', '.join(sorted(refused))})")]


def refusals_of(entries: Sequence[JournalEntry]) -> Counter[str]:
    """Return the number of refused requests among `entries` by error code."""
    total = Counter[str]()
    for entry in entries:
        if entry.what == "refused":
            total[entry.code] += max(entry.count, 1)
    return total


def _refused(points: Sequence[SeriesPoint]) -> Counter[str]:
    total = Counter[str]()
    for point in points:
        total.update(point.refused)
    return total


def _calm(seen: Evidence) -> list[ConditionPart]:
    """Return the parts that say what the fleet does while all is well. An absence is only asserted
    for the time that is known.
    """
    live = ConditionPart(text=f"{_answers_word(seen.num_live)} now")
    if seen.counted_from_us == seen.now_us:
        return [live]
    ended = sum(sum(point.ended.values()) for point in seen.points)
    span = " in the last hour" if seen.covers_the_hour(seen.counted_from_us) else " ended"
    parts = [live, ConditionPart(text=f"{_number(ended)}{span}")]
    none = ConditionPart(text="none refused")
    return parts if sum(_refused(seen.points).values()) else [*parts, none]


def _answers_word(count: int) -> str:
    return f"{_number(count)} answer{'' if count == 1 else 's'}"


def _number(count: int) -> str:
    """Format a count with thin spaces between groups of digits."""
    return f"{count:,}".replace(",", "\u202f")


def duration(us: int) -> str:
    """Format microseconds, such as 34 ms, 1.5 s, 11 min 40 s or 2 h 5 min."""
    if us < 99_500:
        return f"{us / 1000:.0f} ms"
    if us < 119_950_000:
        return f"{us / 1e6:.1f} s"
    minutes, seconds = divmod(round(us / 1e6), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
