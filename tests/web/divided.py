"""Workers of a divided model, for pages and metrics to show: a complete route, an anchor that lacks
layers, and span workers outside any route.
"""

import msgspec

from fleet.core.clock import now_us
from fleet.core.ids import StageName
from fleet.spans.protocol.figures import PassSums, SpanFigures, SpanPart
from fleet.telemetry.views import WorkerView
from tests.web.plausible import build_worker
from tests.web.plausible_requests import HOSTILE, worker_id

NUM_PASSES, NUM_ROWS = 12_000, 61_500
ANCHOR, FIRST, SECOND, STANDS_BY, ANCHOR_WITH_GAP, LEAVING = range(40, 46)
"""Numbers in the worker ids of this module."""
GAP = f"no span worker has layers 3, 7 to 9 and the output head {HOSTILE}"


def divided_workers(stage: StageName) -> list[WorkerView]:
    """Return views of an anchor with two span workers (the second is the slower one), of an anchor
    that lacks layers, and of two span workers without a route.
    """
    span = f"{stage}.span"
    hops = (worker_id(span, FIRST), worker_id(span, SECOND))
    spans = ("4:11", "12:output")
    anchor = SpanPart(
        is_anchor=True,
        span="0:3",
        worker_spans=spans,
        hops=hops,
        figures=figures(computed_us=900, waited_us=100, took_us=9_000),
    )
    first = SpanPart(
        is_anchor=False, span=spans[0], anchor=worker_id(stage, ANCHOR), figures=figures(1_900, 300)
    )
    second = SpanPart(
        is_anchor=False,
        span=spans[1],
        anchor=worker_id(stage, ANCHOR),
        figures=figures(3_800, 1_200),
    )
    lacking = SpanPart(is_anchor=True, span="0:3", worker_spans=spans, gap=GAP)
    return [
        _worker(stage, ANCHOR, anchor),
        _worker(span, FIRST, first),
        _worker(span, SECOND, second),
        _worker(span, STANDS_BY, SpanPart(is_anchor=False, span=""), state="standby"),
        _worker(stage, ANCHOR_WITH_GAP, lacking),
        _worker(span, LEAVING, SpanPart(is_anchor=False, span="4:11"), state="leaving"),
    ]


def figures(computed_us: int, waited_us: int, took_us: int = 0) -> SpanFigures:
    """Return the step statistics of a span process: every step took these times, in microseconds,
    and spent 100 us sending.
    """
    each = {"computed_us": computed_us, "waited_us": waited_us, "sent_us": 100, "took_us": took_us}
    total, recent = (
        {name: value * count for name, value in each.items()} for count in (NUM_PASSES, 200)
    )
    return SpanFigures(
        weight_bytes=1_500_000_000,
        received_bytes=310_000_000,
        sent_bytes=620_000_000,
        total=PassSums(num_passes=NUM_PASSES, num_rows=NUM_ROWS, **total),
        recent=PassSums(num_passes=200, num_rows=1_025, **recent),
    )


def _worker(role: str, number: int, part: SpanPart, state: str = "ready") -> WorkerView:
    return build_worker(
        role,
        number,
        state=state,
        started_us=now_us() - 600_000_000,
        lease_left_s=1.0,
        device="cpu",
        package="0.1.0",
        protocol="5",
        part=part,
    )


def without_figures(view: WorkerView) -> WorkerView:
    """Return the worker view as it is before the worker's first step, without step statistics."""
    assert view.part is not None
    return msgspec.structs.replace(
        view, part=msgspec.structs.replace(view.part, figures=SpanFigures())
    )
