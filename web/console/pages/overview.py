"""The Overview page: the pipeline from the gateway through the stages to the listener, and charts
of the last 15 minutes.

Knows no stage by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleet.core.ids import stage_of
from fleet.telemetry.trace import RequestFilter, RequestRow
from fleet.telemetry.views import SERIES_STEP_S, RoleQueue, SeriesPoint, WorkerView
from web.console import formats
from web.console.charts import Chart, ChartLine, draw_path, find_last, find_top
from web.console.missing_roles import describe_missing
from web.console.page_context import LivePage, PageContext, Query

NUM_FAILURES = 5
NUM_POINTS = 15 * 60 // SERIES_STEP_S
Pick = Callable[[SeriesPoint], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """A stage as the overview shows it. `up`, `standby`, `starting` and `draining` count its
    workers in these states, `draining` the workers that accept no more tasks; `wanted` counts the
    replicas in the configuration. `loaded_percent` is the percentage of the weights that the most
    advanced starting worker has loaded; None if unknown. `waiting` counts tasks, `oldest_s` is the
    longest wait among them. `busy` is the chart path of the running tasks over time, `resources` a
    text about memory and load of the workers.

    `p50_ms` and `p95_ms` are durations of tasks, as last measured at `at_us`; None without a
    measurement.
    """

    name: str
    up: int
    wanted: int
    standby: int
    starting: int
    loaded_percent: int | None
    draining: int
    running: int
    capacity: int
    waiting: int
    oldest_s: float
    p50_ms: float | None
    p95_ms: float | None
    at_us: int
    busy: str
    resources: str

    @property
    def absent(self) -> bool:
        """True if no worker of the stage is up, on standby, starting or draining."""
        return not (self.up or self.standby or self.draining or self.starting)

    @property
    def full(self) -> bool:
        return 0 < self.capacity <= self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewContext(PageContext):
    gateways: int
    live: int
    stages: tuple[StageSummary, ...]
    charts: tuple[Chart, ...]
    failures: tuple[RequestRow, ...]


class OverviewPage(LivePage):
    key = active = "overview"
    path = "/overview"
    live = ("trouble", "topology", "charts", "failures")

    def empty(self, query: Query) -> OverviewContext:
        return self._build([], [], [], 0, (), known=False)

    async def read(self, query: Query) -> OverviewContext:
        telemetry = self._gateway.client.telemetry
        failed = await telemetry.list_requests(RequestFilter(state="failed"), limit=NUM_FAILURES)
        workers, queues = await telemetry.workers(), await telemetry.queues()
        trouble, remedy = describe_missing(await telemetry.missing_roles(), workers, queues)
        series = (await telemetry.series())[-NUM_POINTS:]
        built = self._build(workers, queues, series, await telemetry.num_live(), failed.rows)
        return replace(built, trouble=trouble, remedy=remedy)

    def _build(
        self,
        workers: Sequence[WorkerView],
        queues: Sequence[RoleQueue],
        series: Sequence[SeriesPoint],
        live: int,
        failures: Sequence[RequestRow],
        *,
        known: bool = True,
    ) -> OverviewContext:
        return OverviewContext(
            gateways=sum(1 for view in workers if not view.role and not view.gone),
            live=live,
            stages=self._stages(workers, queues, series),
            charts=build_charts(series, known),
            failures=tuple(failures),
        )

    def _stages(
        self,
        workers: Sequence[WorkerView],
        queues: Sequence[RoleQueue],
        series: Sequence[SeriesPoint],
    ) -> tuple[StageSummary, ...]:
        boxes: list[StageSummary] = []
        for stage in self._gateway.graph.stages:
            name = stage.name
            serving = [
                view
                for view in workers
                if stage_of(view.role) == name and not view.gone and view.state != "late"
            ]
            waiting = [queue for queue in queues if queue.stage == name]
            at_us = [point.at_us for point in series]
            p50_ms, p50_at = find_last([point.task_p50_ms.get(name) for point in series], at_us)
            busy: list[float | None] = [_count_of_stage(point.running, name) for point in series]
            box = StageSummary(
                name=name,
                up=sum(1 for view in serving if view.state == "ready"),
                wanted=sum(role.replicas for role in self._gateway.config.roles_of(name)),
                standby=sum(1 for view in serving if view.state == "standby"),
                starting=sum(queue.starting for queue in waiting),
                loaded_percent=max(
                    (queue.loaded_percent for queue in waiting if queue.loaded_percent is not None),
                    default=None,
                ),
                draining=sum(1 for view in serving if view.state in ("draining", "leaving")),
                running=sum(view.running for view in serving),
                capacity=sum(view.capacity for view in serving if view.state == "ready"),
                waiting=sum(queue.queue_depth for queue in waiting),
                oldest_s=max((queue.oldest_s for queue in waiting), default=0.0),
                p50_ms=p50_ms,
                p95_ms=find_last([point.task_p95_ms.get(name) for point in series], at_us)[0],
                at_us=p50_at,
                busy=draw_path(busy, find_top(busy)),
                resources=format_resources(serving),
            )
            boxes.append(box)
        return tuple(boxes)


def format_resources(workers: Sequence[WorkerView]) -> str:
    """Describe memory and load of a stage's workers together; "" before their first report."""
    on_gpu = [view for view in workers if view.gpu]
    if on_gpu:
        busy = [view.gpu_percent for view in on_gpu if view.gpu_percent is not None]
        text = f"{formats.size(sum(view.gpu_own_bytes for view in on_gpu))} on GPU"
        return f"{text}, {max(busy)} % busy" if busy else text
    memory = sum(view.memory_bytes for view in workers)
    cores = sum(view.cpu_percent for view in workers) / 100
    return f"{formats.size(memory)}, {cores:.1f} cores" if memory else ""


def _count_of_stage(counts: dict[str, int], stage: str) -> float:
    return sum(count for role, count in counts.items() if stage_of(role) == stage)


def build_charts(series: Sequence[SeriesPoint], known: bool) -> tuple[Chart, ...]:
    """Return the charts of requests, first audio, real-time factor and underruns. `known` is False
    if the fleet could not be read.
    """
    underruns = sum(point.underruns for point in series)
    charts = (
        _chart(
            series,
            "rate",
            "Requests",
            formats.rate,
            ("only", lambda point: point.submitted / SERIES_STEP_S),
        ),
        _chart(
            series,
            "first-audio",
            "First audio, p50 and p95",
            formats.ms,
            ("p50", lambda point: point.first_audio_p50_ms),
            ("p95", lambda point: point.first_audio_p95_ms),
        ),
        _chart(
            series,
            "rtf",
            "Real-time factor, p95",
            formats.ratio,
            ("only", lambda point: point.rtf_p95),
        ),
        replace(
            _chart(
                series,
                "underruns",
                "Underruns",
                _format_per_step,
                ("only", lambda point: float(point.underruns)),
            ),
            now=f"{formats.count(underruns)} in 15 min" if series else formats.NOTHING,
            at_us=0,
        ),
    )
    return charts if known else tuple(replace(chart, note="not available") for chart in charts)


def _format_per_step(value: float | None) -> str:
    return f"{formats.count(value)} in {SERIES_STEP_S} s"


def _chart(
    series: Sequence[SeriesPoint],
    key: str,
    title: str,
    unit: Callable[[float | None], str],
    *picks: tuple[str, Pick],
) -> Chart:
    at_us = [point.at_us for point in series]
    values = {kind: [pick(point) for point in series] for kind, pick in picks}
    top = find_top(*values.values())
    lasts = {kind: find_last(measured, at_us) for kind, measured in values.items()}
    now = " / ".join(unit(value) for value, _ in lasts.values())
    return Chart(
        key=key,
        title=title,
        now=now,
        at_us=max((at for _, at in lasts.values()), default=0),
        note=f"top {unit(top)}"
        if top
        else "nothing measured"
        if not any(at for _, at in lasts.values())
        else "none",
        description=f"{title}: {now} now, at most {unit(top)} in the last 15 minutes",
        lines=tuple(
            ChartLine(kind=kind, path=draw_path(measured, top)) for kind, measured in values.items()
        ),
    )
