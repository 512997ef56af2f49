"""Routes of divided models, as the console, `fleet status` and the metrics show them. Computed from
the views of the workers; no I/O.
"""

from collections.abc import Mapping, Sequence

import msgspec

from fleet.core.ids import StageName, WorkerId, stage_of
from fleet.spans.protocol.figures import PassSums, SpanPart
from fleet.spans.protocol.layers import LayerSpan
from fleet.telemetry.views import WorkerView

NOT_NEEDED = "its anchor accepts no tasks, and needs no span workers"


class HopView(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a route, with its step statistics. If no worker of the route has `span`,
    `worker` is "" and every other field is empty.

    `num_passes` (steps), `num_rows` (positions), `received_bytes` and `sent_bytes` count since the
    process joined the fleet; see `SpanFigures`. `rows_per_pass` and the times `*_us` (microseconds)
    are means per step over the last `num_recent` steps, None before the first step; see `PassSums`.
    `share`: percentage of a step's duration spent in this process; None until all processes of the
    route have computed a step. `computes_most`: True for the process with the longest computation
    per step, whose span should shrink.
    """

    span: str
    is_anchor: bool = False
    worker: str = ""
    state: str = ""
    weight_bytes: int = 0
    num_passes: int = 0
    num_rows: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    num_recent: int = 0
    rows_per_pass: float | None = None
    computed_us: int | None = None
    waited_us: int | None = None
    sent_us: int | None = None
    share: float | None = None
    computes_most: bool = False

    @property
    def busy_us(self) -> int:
        """Time of a step in this process, in microseconds: waiting, computing and sending."""
        return (self.computed_us or 0) + (self.waited_us or 0) + (self.sent_us or 0)


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """The route of one anchor. `hops`: the processes of the route, the anchor included, in the
    order of their layers.

    `gap`: why the anchor cannot compute, with every missing range of layers; "" if it can.
    `pass_us`: mean duration of the anchor's last steps, in microseconds. `between_us`: the part of
    `pass_us` outside all processes, on the network or in the receiver's kernel. The two times are
    None until all processes of the route have computed a step.
    """

    stage: StageName
    anchor: WorkerId
    gap: str
    pass_us: int | None
    between_us: int | None
    hops: tuple[HopView, ...]

    @property
    def longest_us(self) -> int:
        """Longest step time of any process of the route, in microseconds."""
        return max(hop.busy_us for hop in self.hops)

    @property
    def num_recent(self) -> int:
        """Number of steps over which the anchor's mean times are taken."""
        return next(hop.num_recent for hop in self.hops if hop.is_anchor)


class UnusedSpanWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A span worker that belongs to no route, and the reason. `span`: the layers that it has
    loaded; "" if it has loaded no layers.
    """

    worker: WorkerId
    role: str
    state: str
    span: str
    reason: str


class SpanRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """The routes of all anchors, and the span workers that belong to no route."""

    routes: tuple[RouteView, ...]
    unused: tuple[UnusedSpanWorker, ...]


def routes_of(workers: Sequence[WorkerView]) -> SpanRoutes:
    """Return the routes of all anchors among `workers`. Processes that have left are ignored."""
    listed = {
        view.id: (view, view.part) for view in workers if not view.gone and view.part is not None
    }
    anchors = [(view, part) for view, part in listed.values() if part.is_anchor]
    used = {hop for _, part in anchors for hop in part.hops}
    unused = [
        (view, part) for view, part in listed.values() if not part.is_anchor and view.id not in used
    ]
    return SpanRoutes(
        routes=tuple(
            _route(view, part, {worker: found for worker, (found, _) in listed.items()})
            for view, part in anchors
        ),
        unused=tuple(_unused(view, part, anchors) for view, part in unused),
    )


def _route(anchor: WorkerView, part: SpanPart, views: Mapping[WorkerId, WorkerView]) -> RouteView:
    hops = [
        _hop(span, None if worker is None else views.get(worker)) for span, worker in _places(part)
    ]
    own = _hop(part.span, anchor)
    is_first = LayerSpan.parse(part.span, "span").first == 0
    hops = [own, *hops] if is_first else [*hops, own]
    gap = part.gap or ("" if part.hops else NOT_NEEDED)
    route = RouteView(
        stage=stage_of(anchor.role),
        anchor=anchor.id,
        gap=gap,
        pass_us=None,
        between_us=None,
        hops=tuple(hops),
    )
    return (
        route
        if any(hop.computed_us is None for hop in hops)
        else _compared(route, part.figures.recent)
    )


def _compared(route: RouteView, own: PassSums) -> RouteView:
    """Return `route` with its step times and each process's share of them. All its processes must
    have computed a step. `own`: the anchor's sums over its last steps.
    """
    total_us = sum(hop.busy_us for hop in route.hops)
    # Not less than the sum: the processes' last passes are not quite the same ones.
    pass_us = max(total_us, round(own.took_us / own.num_passes))
    most_us = max(hop.computed_us or 0 for hop in route.hops)
    return msgspec.structs.replace(
        route,
        pass_us=pass_us,
        between_us=pass_us - total_us,
        hops=tuple(
            msgspec.structs.replace(
                hop,
                share=round(100 * hop.busy_us / max(1, pass_us), 1),
                computes_most=hop.computed_us == most_us,
            )
            for hop in route.hops
        ),
    )


def _places(anchor: SpanPart) -> list[tuple[str, WorkerId | None]]:
    """Return the spans of an anchor's route, each with its worker; the workers are None while the
    anchor has no route.
    """
    return list(
        zip(anchor.worker_spans, anchor.hops or [None] * len(anchor.worker_spans), strict=True)
    )


def _hop(span: str, view: WorkerView | None) -> HopView:
    if view is None or view.part is None:
        return HopView(span=span)
    figures, recent = view.part.figures, view.part.figures.recent
    return HopView(
        span=span,
        is_anchor=view.part.is_anchor,
        worker=view.id,
        state=view.state,
        weight_bytes=figures.weight_bytes,
        num_passes=figures.total.num_passes,
        num_rows=figures.total.num_rows,
        received_bytes=figures.received_bytes,
        sent_bytes=figures.sent_bytes,
        num_recent=recent.num_passes,
        rows_per_pass=round(recent.num_rows / recent.num_passes, 2) if recent.num_passes else None,
        computed_us=_mean(recent.computed_us, recent),
        waited_us=_mean(recent.waited_us, recent),
        sent_us=_mean(recent.sent_us, recent),
    )


def _mean(sum_us: int, over: PassSums) -> int | None:
    return round(sum_us / over.num_passes) if over.num_passes else None


def _unused(
    view: WorkerView, part: SpanPart, anchors: Sequence[tuple[WorkerView, SpanPart]]
) -> UnusedSpanWorker:
    gaps = [anchor.gap for other, anchor in anchors if stage_of(other.role) == stage_of(view.role)]
    if view.state in ("draining", "leaving", "late"):
        reason = f"is {view.state}: it gets no layers"
    elif view.standby:
        reason = "stands by: it replaces a worker that is lost"
    elif not gaps:
        reason = "free: no anchor of its stage is listed"
    elif any(gaps):
        reason = "free: its stage has too few span workers for a route"
    else:
        reason = "free: each span of each route has a worker"
    return UnusedSpanWorker(
        worker=view.id, role=view.role, state=view.state, span=part.span, reason=reason
    )
