"""Workers: who serves what, how full, how well; and one worker with what it holds and said. Knows no stage by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.core.errors import NotFound
from fleet.core.ids import stage_of
from fleet.core.story import RequestFilter
from fleet.core.telemetry import LogLine, LogQuery, WorkerStory
from web.gateway import Gateway
from web.pages.frame import Frame, Query, colours, stream_path
from web.pages.requests import Row, row_of

NUM_REQUESTS, NUM_LINES = 20, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """`orders`: what it can be told now."""

    view: WorkerStory
    colour: int
    orders: tuple[str, ...]

    @property
    def role(self) -> str:
        return self.view.role or "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Frame):
    here: tuple[WorkerRow, ...]
    gone: tuple[WorkerRow, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWorker(Frame):
    """`row` is None where the worker is not known, or no longer."""

    id: str
    row: WorkerRow | None
    requests: tuple[Row, ...] = ()
    lines: tuple[LogLine, ...] = ()


class _Reader:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._colours = colours(gateway.graph)

    def _row(self, view: WorkerStory) -> WorkerRow:
        return WorkerRow(view=view, colour=self._colours.get(stage_of(view.role), -1), orders=orders_of(view))


def orders_of(view: WorkerStory) -> tuple[str, ...]:
    """What makes sense to tell it: nothing to a gateway, nor to one that has gone or is going."""
    if view.gone or not view.role or view.state in ("leaving", "late"):
        return ()
    return ("resume", "stop") if view.state == "draining" else ("drain", "stop")


class WorkersPage(_Reader):
    key = active = "workers"
    template = "workers.html"
    live = ("trouble", "workers", "gone")

    def empty(self, query: Query) -> Workers:
        return self._built([], [])

    async def read(self, query: Query) -> Workers:
        client = self._gateway.client
        return self._built(await client.telemetry.workers(), await client.missing_roles())

    def _built(self, workers: Sequence[WorkerStory], missing: Sequence[str]) -> Workers:
        rows = [self._row(view) for view in workers]
        return Workers(
            title="Workers",
            stream=stream_path(self.key, {}),
            trouble=f"No worker for {', '.join(missing)}. Start one:" if missing else "",
            remedy=f"fleet worker {missing[0]}" if missing else "",
            here=tuple(row for row in rows if not row.view.gone),
            gone=tuple(row for row in rows if row.view.gone),
            missing=tuple(missing),
        )


class OneWorkerPage(_Reader):
    key = "worker"
    active = "workers"
    template = "worker.html"
    live = ("trouble", "summary", "tasks", "recent", "log")

    def empty(self, query: Query) -> OneWorker:
        return OneWorker(title=query["id"], id=query["id"], stream=stream_path(self.key, {"id": query["id"]}), row=None)

    async def read(self, query: Query) -> OneWorker:
        """Raises: NotFound, RedisUnreachable."""
        telemetry, worker = self._gateway.client.telemetry, query["id"]
        view = next((view for view in await telemetry.workers() if view.id == worker), None)
        if view is None:
            raise NotFound(f"no worker {worker!r}; those that are gone are forgotten after some minutes", param="id")
        held = await telemetry.requests(RequestFilter(worker=worker), limit=NUM_REQUESTS)
        logged = await telemetry.logs(LogQuery(worker=worker), limit=NUM_LINES)
        return OneWorker(
            title=worker,
            id=worker,
            stream=stream_path(self.key, {"id": worker}),
            row=self._row(view),
            requests=tuple(row_of(row, self._colours, self._gateway) for row in held.rows),
            lines=logged.lines,
        )
