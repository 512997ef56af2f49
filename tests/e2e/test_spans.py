"""Loss of span workers and anchors in mid-answer, by signals to real processes: the answers are those of an undisturbed run."""

import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from fleet.control import keys
from fleet.core.ids import WorkerId, place_of
from tests.e2e.fleets import PATIENCE_S, process_of, worker_ids
from tests.e2e.span_fleets import SpanFleet, compare_disturbed_streams, span_fleet
from tests.support import wait_until

FORWARD = ("0:0", ("1:1", "2:2", "3:output"))
REVERSE = ("2:output", ("0:0", "1:1"))
SHORT_LEASE = "lease.worker_ttl_s=1"


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanFleet]:
    """Three span workers after the anchor."""
    with span_fleet(tmp_path_factory.mktemp("forward"), *FORWARD, num_layers=4) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanFleet]:
    """Two span workers before the anchor, and one that stands by."""
    with span_fleet(tmp_path_factory.mktemp("reverse"), *REVERSE, "stages.lm.spans.standby=1", SHORT_LEASE) as fleet:
        yield fleet


def kill_workers(fleet: SpanFleet, *spans: str) -> Callable[[], None]:
    """Return a fault: SIGKILL to the span workers that have these spans."""

    def kill() -> None:
        route = fleet.route()
        for span in spans:
            process_of(route[span]).kill()
        lost = {route[span] for span in spans}
        wait_until(lambda: not lost & worker_ids(fleet.control), "the deaths to be noticed", PATIENCE_S)

    return kill


@pytest.mark.parametrize("spans", [("1:1",), ("2:2",), ("3:output",), ("1:1", "2:2", "3:output")], ids=" ".join)
async def test_killed_span_workers_of_three_change_no_answer(forward: SpanFleet, spans: tuple[str, ...]) -> None:
    forward.wait_complete(1, 3)
    before = forward.route()
    await compare_disturbed_streams(forward, kill_workers(forward, *spans))
    after = forward.route()
    assert {span for span, worker in after.items() if before[span] != worker} == set(spans)
