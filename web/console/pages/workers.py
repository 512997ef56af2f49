"""The Workers page with roles, load and state of all workers; and the page of one worker, present
or gone, with its tasks and log lines. Knows no stage by name.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from fleet.core.errors import quoted
from fleet.core.ids import WorkerId, stage_of
from fleet.telemetry.routes import HopView, RouteView, UnusedSpanWorker, routes_of
from fleet.telemetry.trace import RequestFilter, RequestRow
from fleet.telemetry.views import (
    GONE_KEPT_DAYS,
    MAX_GONE_KEPT,
    LogLine,
    LogQuery,
    TaskRef,
    WorkerView,
)
from web.console.missing_roles import describe_missing
from web.console.page_context import FilterLink, LivePage, PageContext, Query, build_path
from web.console.pages.requests import RequestTableRow, build_row
from web.gateway.fleet_metrics import GATEWAY_ROLE

PATH = "/workers"
NUM_REQUESTS, NUM_LINES = 20, 50
RECOVERY_S = 600
"""Seconds after the end of a worker within which its tasks are looked for in the journal."""
MAX_ROWS, MAX_GONE, MAX_ROUTES, MAX_UNUSED = 100, 20, 10, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A row of the table of workers. `commands` are the orders that the worker accepts now. `last`
    is True if no other worker of its role is ready or on standby.
    """

    view: WorkerView
    commands: tuple[str, ...]
    last: bool

    @property
    def role(self) -> str:
        return self.view.role or GATEWAY_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersContext(PageContext):
    """Data of the page of all workers, or of the workers of one role.

    `role` is the chosen role, "" for all roles. `here` lists at most `MAX_ROWS` present workers,
    `gone` workers that ended lately. `first` and `more` are the paths of the first page and of the
    next page, "" if there is none. `routes` are routes of divided models, `unused` span workers
    that belong to no route. `num_routes` and `num_unused` are the full numbers, including what the
    page omits.
    """

    role: str
    chips: tuple[FilterLink, ...]
    first: str
    more: str
    here: tuple[WorkerRow, ...]
    gone: tuple[WorkerRow, ...]
    routes: tuple[RouteView, ...]
    num_routes: int
    unused: tuple[UnusedSpanWorker, ...]
    num_unused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTaskRow:
    """A task that a worker held when it ended. `state` is the state of the task's request, "" if
    the request is no longer stored. `worker` has the task now or had it last, "" if unknown.
    `pause_ms` is the time until a worker claimed the task again; None if no worker did.
    """

    task: TaskRef
    state: str
    worker: str
    pause_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWorkerContext(PageContext):
    """Data of the page of one worker.

    `row` is the worker, None if it is unknown. `held` lists the tasks that a worker held when it
    ended, `requests` the last requests of a present one. `route` is the route of a divided model to
    which the worker belongs, None for other workers. `hop` is the worker's own process in `route`,
    with its span and step times. `kept_days` is the number of days for which a record is kept.
    """

    id: str
    row: WorkerRow | None = None
    route: RouteView | None = None
    hop: HopView | None = None
    kept_days: int = GONE_KEPT_DAYS
    held: tuple[HeldTaskRow, ...] = ()
    requests: tuple[RequestTableRow, ...] = ()
    lines: tuple[LogLine, ...] = ()


class _WorkerPage(LivePage):
    def _row(self, view: WorkerView, workers: Sequence[WorkerView]) -> WorkerRow:
        others = [other for other in workers if other.role == view.role and other.id != view.id]
        last = not any(other.state in ("ready", "standby") for other in others)
        return WorkerRow(view=view, commands=find_available_commands(view), last=last)


def find_available_commands(view: WorkerView) -> tuple[str, ...]:
    """Return the orders that a worker accepts; empty for a gateway, and for a worker that has left
    or is leaving.
    """
    if view.gone or not view.role or view.state in ("leaving", "late"):
        return ()
    return ("resume", "stop") if view.state == "draining" else ("drain", "stop")


class WorkersPage(_WorkerPage):
    key = active = "workers"
    path = "/workers"
    live = ("trouble", "roles", "routes", "workers", "gone")

    def empty(self, query: Query) -> WorkersContext:
        return self._build(query, [])

    async def read(self, query: Query) -> WorkersContext:
        telemetry = self._gateway.client.telemetry
        workers, missing = await telemetry.workers(with_gone=True), await telemetry.missing_roles()
        trouble, remedy = describe_missing(
            missing, workers, await telemetry.roles() if missing else []
        )
        return replace(self._build(query, workers), trouble=trouble, remedy=remedy)

    def _build(self, query: Query, workers: Sequence[WorkerView]) -> WorkersContext:
        role, after = query.get("role", ""), query.get("after", "")
        here = [view for view in workers if not view.gone]
        matching = [view for view in here if role in ("", view.role or GATEWAY_ROLE)]
        start = next((place + 1 for place, view in enumerate(matching) if view.id == after), 0)
        shown = matching[start : start + MAX_ROWS]
        spans, stage = routes_of(here), stage_of(role)
        routes = [route for route in spans.routes if stage in ("", route.stage)]
        unused = [free for free in spans.unused if stage in ("", stage_of(free.role))]
        return WorkersContext(
            stream_query={"role": role, "after": after},
            role=role,
            chips=self._chips(here, role),
            first=build_path(PATH, {"role": role}) if start else "",
            more=build_path(PATH, {"role": role, "after": shown[-1].id})
            if shown and len(matching) > start + MAX_ROWS
            else "",
            here=tuple(self._row(view, here) for view in shown),
            gone=tuple([self._row(view, here) for view in workers if view.gone][:MAX_GONE]),
            routes=tuple(routes[:MAX_ROUTES]),
            num_routes=len(routes),
            unused=tuple(unused[:MAX_UNUSED]),
            num_unused=len(unused),
        )

    def _chips(self, here: Sequence[WorkerView], chosen: str) -> tuple[FilterLink, ...]:
        counts = {"": len(here), **Counter(view.role or GATEWAY_ROLE for view in here)}
        return tuple(
            FilterLink(
                name=role, count=count, path=build_path(PATH, {"role": role}), chosen=role == chosen
            )
            for role, count in counts.items()
        )


class OneWorkerPage(_WorkerPage):
    key = "worker"
    active = "workers"
    path = "/workers/{id}"
    live = ("trouble", "summary", "tasks", "recent", "log")

    def empty(self, query: Query) -> OneWorkerContext:
        return OneWorkerContext(id=query["id"], stream_query={"id": query["id"]})

    async def read(self, query: Query) -> OneWorkerContext:
        """Return the data of the worker named in `query`; for a worker of which no record is kept,
        only its log lines, with the status 404.

        Raises: RedisUnreachable.
        """
        telemetry, worker = self._gateway.client.telemetry, WorkerId(query["id"])
        view, workers = await telemetry.worker(worker), await telemetry.workers()
        logged = await telemetry.logs(LogQuery(worker=worker), limit=NUM_LINES)
        hops = (
            (route, hop)
            for route in routes_of(workers).routes
            for hop in route.hops
            if hop.worker == worker
        )
        route, hop = next(hops, (None, None))
        context = OneWorkerContext(
            id=worker, stream_query={"id": worker}, route=route, hop=hop, lines=logged.lines
        )
        if view is None:
            trouble = (
                f"no worker {quoted(worker)} is known; the last {MAX_GONE_KEPT} that ended are "
                f"kept for {GONE_KEPT_DAYS} days"
            )
            return replace(context, trouble=trouble, status=HTTPStatus.NOT_FOUND)
        context = replace(context, row=self._row(view, workers))
        if view.gone:
            return replace(context, held=await self._held_by(view))
        last = await telemetry.list_requests(RequestFilter(worker=worker), limit=NUM_REQUESTS)
        return replace(context, requests=tuple(build_row(row, self._gateway) for row in last.rows))

    async def _held_by(self, view: WorkerView) -> tuple[HeldTaskRow, ...]:
        telemetry = self._gateway.client.telemetry
        ids = list(dict.fromkeys(task.request for task in view.held))
        rows = {row.id: row for row in await telemetry.rows_of(ids)}
        recovered = await telemetry.journal(
            since_us=view.ended_us,
            until_us=view.ended_us + RECOVERY_S * 1_000_000,
            what=("recovered",),
        )
        pauses_us = dict[tuple[str, str], int]()
        for entry in recovered:
            pauses_us.setdefault((entry.request, entry.stage), entry.pause_us)
        return tuple(
            _held_row(task, rows.get(task.request), pauses_us.get((task.request, task.stage)))
            for task in view.held
        )


def _held_row(task: TaskRef, row: RequestRow | None, pause_us: int | None) -> HeldTaskRow:
    briefs = row.tasks if row is not None else ()
    return HeldTaskRow(
        task=task,
        state=row.state if row is not None else "",
        worker=next((brief.worker for brief in briefs if brief.stage == task.stage), ""),
        pause_ms=None if pause_us is None else pause_us / 1000,
    )
