"""Step statistics of a route's processes: their sums and window, the routes that a reader builds
from them, and their charts.
"""

import io

import msgspec
import pytest
from rich.console import Console, Group

from fleet.cli.route_tables import BAR_WIDTH, duration, route_tables
from fleet.core.ids import StageName
from fleet.spans.protocol.figures import (
    WINDOW_PASSES,
    PassSums,
    PassTally,
    SpanFigures,
)
from fleet.telemetry.routes import NOT_NEEDED, SpanRoutes, routes_of
from fleet.telemetry.views import WorkerView
from fleet.telemetry.vitals import Vitals
from tests.web.divided import (
    ANCHOR,
    ANCHOR_WITH_GAP,
    FIRST,
    GAP,
    LEAVING,
    NUM_ROWS,
    SECOND,
    STANDS_BY,
    divided_workers,
    without_figures,
)
from tests.web.plausible_requests import worker_id

STAGE, SPAN = StageName("lm"), "lm.span"


def test_tally_has_totals_and_the_sums_of_the_last_passes() -> None:
    tally = PassTally()
    assert tally.sums() == (PassSums(), PassSums())
    for number in range(1, WINDOW_PASSES + 11):
        tally.add(
            PassSums(
                num_passes=1,
                num_rows=2,
                waited_us=number,
                computed_us=10 * number,
                took_us=100 * number,
            )
        )
    total, recent = tally.sums()
    every, last = range(1, WINDOW_PASSES + 11), range(11, WINDOW_PASSES + 11)
    for sums, numbers in ((total, every), (recent, last)):
        assert (sums.num_passes, sums.num_rows) == (len(numbers), 2 * len(numbers))
        assert (sums.waited_us, sums.computed_us, sums.took_us) == (
            sum(numbers),
            10 * sum(numbers),
            100 * sum(numbers),
        )


def test_tally_counts_the_time_to_the_end_of_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = PassTally()
    tally.add(PassSums(num_passes=1))
    when_sent = tally.sending(since_s=7.0)
    assert tally.sums()[0].sent_us == 0
    monkeypatch.setattr("time.monotonic", lambda: 7.25)
    when_sent()
    assert [sums.sent_us for sums in tally.sums()] == [250_000, 250_000]


def test_figures_are_encoded_for_a_record() -> None:
    figures = SpanFigures(
        weight_bytes=5, received_bytes=6, sent_bytes=7, total=PassSums(num_passes=3, took_us=9)
    )
    encoded = str(Vitals(span_figures=figures).encode()["span_figures"])
    assert Vitals.decode({"span_figures": encoded.encode()}).span_figures == figures


def views(*numbers: int) -> list[WorkerView]:
    """Return the workers of the divided fleet with these numbers; without numbers, all."""
    return [view for view in divided_workers(STAGE) if not numbers or view.pid - 4100 in numbers]


def test_route_has_its_processes_in_the_order_of_the_layers() -> None:
    route = routes_of(views()).routes[0]
    assert [(hop.span, hop.worker, hop.is_anchor) for hop in route.hops] == [
        ("0:3", worker_id("lm", ANCHOR), True),
        ("4:11", worker_id(SPAN, FIRST), False),
        ("12:output", worker_id(SPAN, SECOND), False),
    ]
    assert [(hop.computed_us, hop.waited_us, hop.sent_us) for hop in route.hops] == [
        (900, 100, 100),
        (1_900, 300, 100),
        (3_800, 1_200, 100),
    ]
    assert {hop.num_rows for hop in route.hops} == {NUM_ROWS} and {
        hop.rows_per_pass for hop in route.hops
    } == {5.12}
    # 1100 + 2300 + 5100 of 9000 us
    assert (route.pass_us, route.between_us) == (9_000, 500)
    assert [hop.share for hop in route.hops] == [12.2, 25.6, 56.7]
    assert [hop.computes_most for hop in route.hops] == [False, False, True]


def test_anchor_with_the_last_layers_is_the_last_process() -> None:
    anchor, *others = views(ANCHOR, FIRST, SECOND)
    part = anchor.part
    assert part is not None
    turned = msgspec.structs.replace(part, span="12:output", worker_spans=("0:3", "4:11"))
    (route,) = routes_of([msgspec.structs.replace(anchor, part=turned), *others]).routes
    assert [(hop.span, hop.is_anchor) for hop in route.hops] == [
        ("0:3", False),
        ("4:11", False),
        ("12:output", True),
    ]


def test_gap_names_missing_layers_and_leaves_spans_without_workers() -> None:
    route = routes_of(views()).routes[1]
    assert route.anchor == worker_id("lm", ANCHOR_WITH_GAP) and route.gap == GAP
    assert [(hop.span, bool(hop.worker), hop.share) for hop in route.hops] == [
        ("0:3", True, None),
        ("4:11", False, None),
        ("12:output", False, None),
    ]
    assert route.pass_us is route.between_us is None


def test_lost_worker_has_no_place_and_shares_wait_for_its_successor() -> None:
    (route,) = routes_of(views(ANCHOR, SECOND)).routes
    assert [hop.worker for hop in route.hops] == [
        worker_id("lm", ANCHOR),
        "",
        worker_id(SPAN, SECOND),
    ]
    assert all(hop.share is None and not hop.computes_most for hop in route.hops)
    anchor, first, second = views(ANCHOR, FIRST, SECOND)
    (route,) = routes_of([anchor, without_figures(first), second]).routes
    assert route.hops[1].worker and route.hops[1].computed_us is None and route.pass_us is None


def test_anchor_that_needs_no_route_says_so() -> None:
    (anchor,) = views(ANCHOR)
    assert anchor.part is not None
    (route,) = routes_of(
        [msgspec.structs.replace(anchor, part=msgspec.structs.replace(anchor.part, hops=()))]
    ).routes
    assert route.gap == NOT_NEEDED


def reasons(*workers: WorkerView) -> dict[str, str]:
    return {free.worker: free.reason for free in routes_of(workers).unused}


def test_unused_span_workers_have_a_reason() -> None:
    assert reasons(*views()) == {
        worker_id(SPAN, STANDS_BY): "stands by: it replaces a worker that is lost",
        worker_id(SPAN, LEAVING): "is leaving: it gets no layers",
    }
    (first,) = views(FIRST)
    assert reasons(first) == {first.id: "free: no anchor of its stage is listed"}
    assert reasons(first, *views(ANCHOR_WITH_GAP)) == {
        first.id: "free: its stage has too few span workers for a route"
    }
    extra = msgspec.structs.replace(first, id=worker_id(SPAN, 60))
    assert reasons(extra, *views(ANCHOR, FIRST, SECOND)) == {
        extra.id: "free: each span of each route has a worker"
    }


def test_workers_without_a_part_have_no_route() -> None:
    whole = [msgspec.structs.replace(view, part=None) for view in views()]
    assert routes_of(whole) == SpanRoutes(routes=(), unused=())
    assert list(route_tables(routes_of(whole))) == []


def shown(spans: SpanRoutes, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(Group(*route_tables(spans)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_status_shows_a_table_for_each_route(width: int) -> None:
    text = shown(routes_of(views()), width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    for part in (
        "a pass takes 9 ms, 500 us of it between processes (mean of the last 200)",
        "0:3 anchor",
        "12:output",
        "3.8 ms",
        "1.2 ms",
        "296 MiB",
        "57 %",
        "most",
        "no worker",
    ):
        assert part in text, part
    flat = " ".join(text.split())
    assert GAP in flat and f"{worker_id(SPAN, STANDS_BY)}: stands by" in flat
    assert (
        f"{worker_id(SPAN, LEAVING)}: is leaving: it gets no layers; it has loaded layers 4:11"
        in flat
    )


def test_bar_of_the_longest_process_is_full_and_others_are_in_proportion() -> None:
    bars = [
        line
        for line in shown(routes_of(views(ANCHOR, FIRST, SECOND)), 140).splitlines()
        if "█" in line
    ]
    lengths = [sum(line.count(mark) for mark in "█▒░") for line in bars[:3]]
    assert (
        lengths == [round(BAR_WIDTH * us / 5_100) for us in (1_100, 2_300, 5_100)]
        and lengths[2] == BAR_WIDTH
    )


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "-"),
        (0, "0 us"),
        (999, "999 us"),
        (1_234, "1.23 ms"),
        (98_765, "98.8 ms"),
        (12_345_678, "12.3 s"),
    ],
)
def test_durations_have_three_digits(us: int | None, text: str) -> None:
    assert duration(us) == text
