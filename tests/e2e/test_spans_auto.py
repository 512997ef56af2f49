"""Span workers join and leave while their number determines the division of the layers, with real
processes and answers in progress.

The answers are byte-equal to earlier ones.
"""

from collections.abc import Callable, Iterator

import pytest

from fleet.core.ids import WorkerId
from fleet.spans.protocol.layers import LayerSpan
from tests.e2e.fleets import PATIENCE_S, process_of, worker_ids
from tests.e2e.span_fleets import SPAN_ROLE, SpanFleet, automatic_fleet, compare_disturbed_streams
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(4, "spans of processes")

NUM_LAYERS, MOST = 8, 0.45
FORWARD, REVERSE = (
    pytest.param(anchor, id=name, marks=pytest.mark.one_in(2, "automatic spans"))
    for name, anchor in (("forward", "0:0"), ("reverse", "7:output"))
)


@pytest.fixture(scope="module", params=[FORWARD, REVERSE])
def auto_up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpanFleet]:
    """A fleet with an anchor and two span workers."""
    with automatic_fleet(tmp_path_factory.mktemp("auto"), request.param, 2, NUM_LAYERS) as fleet:
        yield fleet


@pytest.fixture
def auto(auto_up: SpanFleet) -> SpanFleet:
    """The fleet with two span workers, or with three after the test in which a third one joins; all
    of them share the layers.
    """
    wait_divided(auto_up, len(auto_up.span_workers))
    return auto_up


def sizes(route: dict[str, WorkerId]) -> list[int]:
    """Return the number of layers of each worker in a route."""
    spans = [LayerSpan.parse(span, "span").of_model(NUM_LAYERS, "span") for span in route]
    return [span.final - span.first + 1 for span in spans]


def wait_divided(
    fleet: SpanFleet, num_workers: int, without: WorkerId | None = None
) -> dict[str, WorkerId]:
    """Wait for a route of `num_workers` span workers, without the worker `without`, whose spans
    together have every layer but the anchor's exactly once.
    """

    def is_divided() -> bool:
        return any(
            len(route) == num_workers
            and without not in route.values()
            and sum(sizes(route)) == NUM_LAYERS - 1
            for route in fleet.live_routes()
        )

    wait_until(is_divided, f"a route of {num_workers} span workers", PATIENCE_S)
    return fleet.route()


def joins(fleet: SpanFleet) -> Callable[[], None]:
    def join() -> None:
        fleet.start_worker()
        route = wait_divided(fleet, 3)
        assert max(sizes(route)) <= MOST * NUM_LAYERS

    return join


async def test_third_span_worker_shares_the_layers_until_it_is_drained(auto: SpanFleet) -> None:
    assert sorted(sizes(auto.route())) == [3, 4]
    await compare_disturbed_streams(auto, joins(auto))
    drained = next(iter(auto.route().values()))

    def drain() -> None:
        auto.order(drained, "drain").raise_for_status()
        wait_divided(auto, 2, without=drained)

    await compare_disturbed_streams(auto, drain)
    assert drained in auto.span_workers and not auto.num_deaths()
    resumed = auto.order(drained, "resume")
    resumed.raise_for_status()
    wait_divided(auto, 3)
    await compare_disturbed_streams(auto, lambda: None)


async def test_layers_of_a_killed_span_worker_are_shared_by_the_others_until_it_returns(
    auto: SpanFleet,
) -> None:
    before = auto.route()
    killed = next(iter(before.values()))

    def kill() -> None:
        process_of(killed).kill()
        wait_until(
            lambda: killed not in worker_ids(auto.control), f"{killed} to be unlisted", PATIENCE_S
        )
        wait_divided(auto, len(before) - 1)

    with auto.no_starts():
        await compare_disturbed_streams(auto, kill)
    auto.wait_complete(1, len(before))
    wait_divided(auto, len(before))
    await compare_disturbed_streams(auto, lambda: None)


async def test_successor_of_a_killed_anchor_uses_the_layers_that_are_loaded(
    auto: SpanFleet,
) -> None:
    (anchor,), before = auto.anchors, auto.route()
    num_loads = auto.up.running.output().count("loading layers")

    def kill() -> None:
        process_of(anchor).kill()
        wait_until(
            lambda: anchor not in worker_ids(auto.control), f"{anchor} to be unlisted", PATIENCE_S
        )

    await compare_disturbed_streams(auto, kill)
    assert auto.route() == before
    assert auto.up.running.output().count("loading layers") == num_loads


def test_last_span_worker_cannot_be_drained(auto: SpanFleet) -> None:
    *others, last = auto.span_workers
    missing = "1 to 7" if any("output" in span for span in auto.route()) else "0 to 6"
    for worker in others:
        auto.order(worker, "drain").raise_for_status()
        wait_until(
            lambda worker=worker: worker not in auto.route().values(),
            "a route without it",
            PATIENCE_S,
        )
    refused = auto.order(last, "drain")
    assert refused.status_code == 409
    assert f"without it no span worker has layers {missing} of lm" in refused.text
    assert f"start one with `fleet worker {SPAN_ROLE}`" in refused.text
    for worker in auto.span_workers:
        auto.order(worker, "resume").raise_for_status()
