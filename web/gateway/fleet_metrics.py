"""Prometheus metrics about the whole fleet, made from its telemetry at each scrape. Every gateway
shows the same values. Knows no route.
"""

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from fleet.core.ids import stage_of
from fleet.telemetry.counts import BOUNDS_US
from fleet.telemetry.routes import routes_of
from fleet.telemetry.views import EdgeTransfer, RoleView, WorkerView

GATEWAY_ROLE = "gateway"
BUCKET_STEP = 6
"""Step from one exported histogram bound to the next. The workers' bounds are 12 % apart, so that
exported bounds double.
"""
ROLE_GAUGES = {
    "queue_depth": (
        "queue_depth",
        "Granted tasks of the role that no worker has claimed.",
    ),
    "queue_oldest_seconds": (
        "oldest_s",
        "Time since the grant of the role's oldest unclaimed task; 0 without one.",
    ),
    "queue_lag": ("lag", "Unclaimed tasks of the role that no worker has read yet."),
    "running": ("running", "Tasks that workers of the role run."),
    "capacity": (
        "capacity",
        "Tasks that the role's workers can run together, without draining and standby workers.",
    ),
    "draining": ("draining", "Workers of the role that finish their tasks and claim no others."),
    "standby": (
        "standby",
        "Loaded workers that receive no tasks until a worker of the role is lost.",
    ),
}
"""Name of each metric of a role -> the field of `RoleView` with its value, and its help text."""

Samples = Iterable[tuple[Sequence[str], float]]
"""Samples of one metric: label values and value of each sample."""


class FleetMetrics:
    """Prometheus collector of the fleet's metrics. Exports the values of the last call of
    `show`.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.show()

    def show(
        self,
        workers: Sequence[WorkerView] = (),
        roles: Sequence[RoleView] = (),
        edges: Sequence[EdgeTransfer] = (),
    ) -> None:
        """Replace the exported values by the telemetry of `workers`, `roles` and `edges`."""
        self._workers = workers
        self._roles = roles
        self._edges = edges

    def collect(self) -> Iterator[Metric]:
        yield from self._task_metrics()
        yield from _transfer_metrics(self._edges)
        yield from _span_metrics(self._workers)
        yield from _draft_metrics(self._workers)

    def _task_metrics(self) -> Iterator[Metric]:
        counts = Counts(view.role or GATEWAY_ROLE for view in self._workers)
        yield _gauges("workers", "Live workers.", "role", (([r], n) for r, n in counts.items()))
        yield _gauges(
            "num_requests_running",
            "Tasks that the worker (`replica`) runs.",
            "model_name stage replica",
            (
                ([self._model, stage_of(view.role), view.id], view.running)
                for view in self._workers
                if view.role
            ),
        )
        waiting = Counts[str]()
        for role in self._roles:
            waiting[stage_of(role.role)] += role.queue_depth
        yield _gauges(
            "num_requests_waiting",
            "Granted tasks of the stage that no worker has claimed.",
            "model_name stage",
            (([self._model, stage], depth) for stage, depth in waiting.items()),
        )
        for name, (field, text) in ROLE_GAUGES.items():
            values = (([view.role], getattr(view, field)) for view in self._roles)
            yield _gauges(f"role_{name}", text, "role", values)


def _gauges(name: str, text: str, labels: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"fleet_{name}", text, labels=labels.split()), samples)


def _counters(name: str, text: str, labels: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"fleet_{name}", text, labels=labels.split()), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _transfer_metrics(edges: Sequence[EdgeTransfer]) -> Iterator[Metric]:
    """Yield the metrics of tensor reads from other workers' memory, by edge, summed over the
    workers.
    """
    yield _counters(
        "transfer_pulls",
        "Reads of another worker's memory, by the live workers.",
        "edge",
        (([edge.edge], edge.num_pulls) for edge in edges),
    )
    yield _counters(
        "transfer_bytes",
        "Bytes of these reads.",
        "edge",
        (([edge.edge], edge.num_bytes) for edge in edges),
    )
    yield _counters(
        "transfer_failures",
        "Reads that were repeated or recomputed.",
        "edge",
        (([edge.edge], edge.num_failed) for edge in edges),
    )
    yield _gauges(
        "transfer_in_flight",
        "Unfinished reads.",
        "edge",
        (([edge.edge], edge.in_flight) for edge in edges),
    )
    seconds = HistogramMetricFamily(
        "fleet_transfer_seconds",
        "Duration of a read; the sum is up to 12 % high.",
        labels=["edge"],
    )
    for edge in edges:
        seconds.add_metric([edge.edge], *_histogram_of(edge))
    yield seconds


def _span_metrics(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    """Yield the metrics of workers that hold layers of a divided model: steps, times, bytes."""
    parts = [([view.role, view.id], view.part) for view in workers if view.part is not None]
    totals = [(own, part.figures.total) for own, part in parts]
    labels = "role worker"
    yield _counters(
        "span_passes",
        "Passes of a divided model that the worker computed.",
        labels,
        ((own, total.num_passes) for own, total in totals),
    )
    rows = ((own, total.num_rows) for own, total in totals)
    yield _counters("span_rows", "Rows of these passes.", labels, rows)
    yield _counters(
        "span_seconds",
        "Time of these passes in the worker: compute, wait or send.",
        f"{labels} phase",
        (
            ([*own, phase], getattr(total, field) / 1e6)
            for own, total in totals
            for phase, field in PHASES.items()
        ),
    )
    yield _counters(
        "span_pass_seconds",
        "Time from the beginning of passes to their ends.",
        labels,
        ((own, part.figures.total.took_us / 1e6) for own, part in parts if part.is_anchor),
    )
    yield _counters(
        "span_bytes",
        "Bytes on the worker's connections: received or sent.",
        f"{labels} direction",
        (
            ([*own, direction], getattr(part.figures, f"{direction}_bytes"))
            for own, part in parts
            for direction in ("received", "sent")
        ),
    )
    yield _gauges(
        "span_weight_bytes",
        "Bytes of the weights of the worker's layers.",
        labels,
        ((own, part.figures.weight_bytes) for own, part in parts),
    )
    unused = {own[0]: 0 for own, part in parts if not part.is_anchor}
    unused |= Counts(free.role for free in routes_of(workers).unused)
    counts = (([role], count) for role, count in unused.items())
    yield _gauges("span_unused", "Span workers in no route.", "role", counts)


PHASES = {"compute": "computed_us", "wait": "waited_us", "send": "sent_us"}


def _draft_metrics(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    """Yield the metrics of speculative decoding by worker: draft tokens verified and accepted."""
    drafting = [
        ([view.role, view.id, view.speculation.drafter], view.speculation)
        for view in workers
        if view.speculation is not None
    ]
    yield _counters(
        "draft_passes",
        "Passes of requests that ended in draws, each counted.",
        "role worker drafter",
        ((own, stats.num_draws) for own, stats in drafting),
    )
    for name, text, field in (
        ("draft_tokens", "Guessed tokens that were verified, by position.", "drafted"),
        ("draft_accepted_tokens", "Those that were drawn, by position.", "accepted"),
    ):
        yield _counters(
            name,
            text,
            "role worker drafter position",
            (
                ([*own, str(position)], count)
                for own, stats in drafting
                for position, count in enumerate(getattr(stats, field), start=1)
            ),
        )


def _histogram_of(edge: EdgeTransfer) -> tuple[list[tuple[str, float]], float]:
    """Return the durations of an edge's reads as a Prometheus histogram: cumulative counts at every
    `BUCKET_STEP`th of the bounds by which workers count, and the approximate sum. Units: seconds.
    """
    bounds_s = [bound / 1e6 for bound in BOUNDS_US]
    counts = edge.durations or (0,) * len(bounds_s)
    totals = list(accumulate(counts))
    buckets = [
        (floatToGoString(bounds_s[at]), float(totals[at]))
        for at in range(0, len(bounds_s), BUCKET_STEP)
    ]
    return [*buckets, ("+Inf", float(totals[-1]))], sum(
        bound * count for bound, count in zip(bounds_s, counts, strict=True)
    )
