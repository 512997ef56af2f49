"""A span worker and a fork server that hang (SIGSTOP, never continued) are ended by their keepers;
the answers continue, and nobody has to act.
"""

from collections.abc import Iterator

import psutil
import pytest

from fleet.core.ids import WorkerId
from tests.e2e.fleets import PATIENCE_S, START_S, process_of
from tests.e2e.span_fleets import SpanFleet, compare_disturbed_streams, span_fleet
from tests.e2e.test_supervision import is_alive
from tests.support import freeze_process, wait_until

pytestmark = pytest.mark.one_file_in(4, "spans of processes")

FORK_SERVER = "fleet.cli.fork_server"


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanFleet]:
    """A fleet with an anchor that has the first layer, and two span workers after it."""
    folder, layers = tmp_path_factory.mktemp("spans"), ("1:1", "2:output")
    with span_fleet(folder, "0:0", layers, "lease.worker_ttl_s=1") as fleet:
        yield fleet


def server_of(worker: WorkerId) -> psutil.Process:
    server = process_of(worker).parent()
    assert server is not None and FORK_SERVER in server.cmdline()
    return server


async def test_stopped_span_worker_is_ended_and_its_layers_are_computed_again(
    spans: SpanFleet,
) -> None:
    before = spans.route()
    hung = process_of(before["1:1"])
    await compare_disturbed_streams(spans, lambda: freeze_process(hung.pid))
    wait_until(lambda: not is_alive(hung), "the span worker to be ended", PATIENCE_S)
    spans.wait_complete(1, 2)
    assert spans.route()["1:1"] != before["1:1"]


async def test_stopped_fork_server_is_ended_and_replaced(spans: SpanFleet) -> None:
    before = spans.route()
    server, workers = server_of(before["1:1"]), spans.span_workers
    freeze_process(server.pid)
    wait_until(lambda: not is_alive(server), "the fork server to be ended", PATIENCE_S)
    assert spans.span_workers == workers, "its workers continue"

    process_of(before["1:1"]).kill()
    wait_until(
        lambda: spans.span_workers != workers and len(spans.span_workers) == len(workers),
        "another span worker",
        3 * START_S,
    )
    spans.wait_complete(1, 2)
    replaced = spans.route()["1:1"]
    assert replaced != before["1:1"] and server_of(replaced) != server
    await compare_disturbed_streams(spans, lambda: None)
