"""Routes of divided models as the console, `fleet status` and metrics show them, from the views of
the workers. Pure.
"""

from collections.abc import Mapping, Sequence

import msgspec

from fleet.core.ids import StageName, WorkerId, stage_of
from fleet.spans.protocol.figures import PassSums, SpanPart
from fleet.spans.protocol.layers import LayerSpan
from fleet.telemetry.views import WorkerView

NOT_NEEDED = "its anchor accepts no tasks, and needs no span workers"


class HopView(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a route. `worker`: "" for a span that no worker of the route has; then all else
    but `span` is empty.

    `num_passes`, `num_rows` and the bytes count since it joined; see `SpanFigures`. Times are means
    per step over its last `num_recent` steps, in microseconds, None before the first; see
    `PassSums`. `share`: part of a step's time, in percent; None until all processes of the
    route have computed. `computes_most`: True if no process computes longer for a step: a span to
    shrink.
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
        """The time of a pass in this process, which no other process shares."""
        return (self.computed_us or 0) + (self.waited_us or 0) + (self.sent_us or 0)


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """The route of an anchor. `hops`: the processes of the route, the anchor included, in the order
    of the layers.

    `gap`: why the anchor cannot compute, with every missing range of layers; "" if it can. Times
    are microseconds, means over the anchor's last steps, None until all processes have computed:
    `pass_us`, duration of a step; `between_us`, its part in no process: on the network, and until
    the receiver's kernel has delivered it.
    """

    stage: StageName
    anchor: WorkerId
    gap: str
    pass_us: int | None
    between_us: int | None
    hops: tuple[HopView, ...]

    @property
    def longest_us(self) -> int:
        """The longest time of a pass in one process."""
        return max(hop.busy_us for hop in self.hops)

    @property
    def num_recent(self) -> int:
        """Passes over which the anchor's times are means."""
        return next(hop.num_recent for hop in self.hops if hop.is_anchor)


class UnusedSpanWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A span worker without a place in a route, and why. `span`: the one that it has loaded; "" for
    none.
    """

    worker: WorkerId
    role: str
    state: str
    span: str
    reason: str


class SpanRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """The routes of all anchors, and the span workers that are in none."""

    routes: tuple[RouteView, ...]
    unused: tuple[UnusedSpanWorker, ...]


def routes_of(workers: Sequence[WorkerView]) -> SpanRoutes:
    """Return the routes of the listed workers among these."""
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
    """Return a route whose processes have all computed passes, with their shares. `own`: the
    anchor's last passes.
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
    """Return the spans of workers, each with its worker; None without a route."""
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
