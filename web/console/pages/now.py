"""The Now page: the fleet's condition in a sentence with its remedy, the stages of the pipeline,
and the last hour on one axis. Knows no stage by name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.core.ids import RoleName, WorkerId
from fleet.telemetry.condition import DEATHS, Evidence, FleetCondition, is_replaced, judge
from fleet.telemetry.incidents import Incident
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.trace import RequestFilter
from fleet.telemetry.views import SERIES_KEPT_S, RoleQueue, RoleView, SeriesPoint, WorkerView
from web.console.hour import HourWindow
from web.console.hour_charts import HourCharts
from web.console.hour_context import BandContext, draw_band
from web.console.page_context import LivePage, Query
from web.console.stages import StageSummary, summarise_stages, wanted_workers
from web.gateway.gateway import Gateway

MAX_ENTRIES, MAX_EARLIER, NUM_EVENTS, MAX_RESUMABLE = 2000, 200, 12, 3
LISTED = ("died", "lapsed", "left", "joined", "ordered", "leaving", "led", "failed", "refused")
"""Kinds of journal entries in the list of events. `lost` and `recovered` are left out, since the
sentence about the fleet's condition covers them.
"""
UNKNOWN = FleetCondition(level="down", parts=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What an operator can do now. `resumable`: drained workers that the fleet needs. `role`: role
    that needs one more worker, "" if none does. `number`: number of its workers to order, so that a
    `fleet up` starts one more; 0 if none manages the role. `dead`: the process that died last, ""
    without one.
    """

    resumable: tuple[WorkerId, ...] = ()
    role: RoleName = RoleName("")
    number: int = 0
    dead: WorkerId = WorkerId("")

    @property
    def command(self) -> str:
        """Command that starts a worker; "" if none is needed."""
        return f"fleet worker {self.role}" if self.role else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NowContext(BandContext):
    """Data of the Now page. `gateways`: number of gateways. `num_live`: number of live requests.
    `events` are the last listed entries of the journal, newest first. `incident`: the incident that
    is still open, None without one.
    """

    condition: FleetCondition = UNKNOWN
    remedy_of: Remedy = Remedy()
    gateways: int = 0
    num_live: int = 0
    stages: tuple[StageSummary, ...] = ()
    events: tuple[JournalEntry, ...] = ()
    incident: Incident | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What was read of the fleet. `earlier`: the last entries of the journal before the hour."""

    workers: Sequence[WorkerView]
    queues: Sequence[RoleQueue]
    missing: Sequence[RoleName]
    series: Sequence[SeriesPoint]
    entries: Sequence[JournalEntry]
    earlier: Sequence[JournalEntry]
    num_live: int

    @property
    def present(self) -> list[WorkerView]:
        return [view for view in self.workers if not view.gone]


class NowPage(LivePage):
    key = active = "now"
    path = "/now"
    live = ("condition", "topology", "hour", "recent", "events")
    context = NowContext

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        graph = gateway.graph
        self._stages = tuple(stage.name for stage in graph.stages)
        self._needed = [role.name for role in gateway.config.roles() if not role.optional]

    def empty(self, query: Query) -> NowContext:
        return NowContext(stages=summarise_stages(self._gateway, [], [], []))

    async def read(self, query: Query) -> NowContext:
        telemetry = self._gateway.client.telemetry
        # the times of the journal and of the series are those of Redis's clock
        now_us = (await telemetry.list_requests(RequestFilter(), limit=1)).now_us
        begin_us = now_us - SERIES_KEPT_S * 1_000_000
        found = _Read(
            workers=await telemetry.workers(with_gone=True),
            queues=await telemetry.queues(),
            missing=await telemetry.missing_roles(),
            series=await telemetry.series(),
            entries=await telemetry.journal(since_us=begin_us, limit=MAX_ENTRIES),
            earlier=await telemetry.journal(until_us=begin_us, limit=MAX_EARLIER),
            num_live=await telemetry.num_live(),
        )
        return self._build(found, now_us, await self._gateway.incidents.current())

    def _build(self, found: _Read, now_us: int, incident: Incident | None) -> NowContext:
        limits, window = self._gateway.config.limits, HourWindow.until(now_us)
        numbers = wanted_workers(self._gateway, found.queues)
        wanted = {role: numbers[role] for role in self._needed}
        drawn = HourCharts(series=found.series, stages=self._stages, speaks=self._gateway.speaks)
        seen = Evidence(
            now_us=now_us,
            roles=found.queues,
            workers=found.workers,
            wanted=wanted,
            missing=found.missing,
            redis_trouble=self._gateway.client.telemetry.redis_trouble(),
            num_live=found.num_live,
            max_live=limits.max_requests,
            num_waiting=self._gateway.client.requests.num_waiting,
            max_waiting=limits.max_waiting if limits.max_wait_s else 0,
            entries=(*found.earlier, *found.entries),
            journal_from_us=_begin_of_journal(found, now_us),
            points=found.series,
        )
        listed = [entry for entry in found.entries if entry.what in LISTED]
        return NowContext(
            condition=judge(seen),
            remedy_of=find_remedy(found.missing, wanted, found.workers, found.queues, listed),
            gateways=sum(1 for view in found.present if not view.role),
            num_live=found.num_live,
            stages=summarise_stages(self._gateway, found.present, found.queues, found.series),
            band=draw_band(window, drawn, found.entries, found.workers),
            events=tuple(reversed(listed[-NUM_EVENTS:])),
            incident=incident,
        )


def _begin_of_journal(found: _Read, now_us: int) -> int:
    """Return the time from which on every entry of the journal was read: 0 if the entries reach
    back beyond the hour, `now_us` if there is no entry.
    """
    if found.earlier and len(found.entries) < MAX_ENTRIES:
        return 0
    return found.entries[0].at_us if found.entries else now_us


def find_remedy(
    missing: Sequence[RoleName],
    wanted: Mapping[RoleName, int],
    workers: Sequence[WorkerView],
    roles: Sequence[RoleView],
    entries: Sequence[JournalEntry],
) -> Remedy:
    """Return what an operator can do about roles that are missing or have fewer workers than are
    `wanted`, and the last death among `entries`.
    """
    by_role = {role.role: role for role in roles}
    serving = Counter(view.role for view in workers if view.takes_tasks and not view.gone)
    short = [role for role, count in wanted.items() if role in missing or serving[role] < count]
    needed = [role for role in short if not is_replaced(role, workers, by_role.get(role))]
    resumable = [view.id for view in workers if view.state == "draining" and view.role in short]
    dead = next((entry.worker for entry in reversed(entries) if entry.what in DEATHS), WorkerId(""))
    role = needed[0] if needed else RoleName("")
    known = by_role.get(role)
    return Remedy(
        resumable=tuple(resumable[:MAX_RESUMABLE]),
        role=role,
        number=known.wanted + 1 if known is not None and known.managed else 0,
        dead=dead,
    )
