"""Step statistics that each process of a route counts: passes, rows, bytes, waiting; also through
losses of workers.
"""

import threading
from pathlib import Path

import pytest

from fleet.core.request import Sampling
from fleet.spans.protocol.figures import PassSums, SpanFigures
from tests.oracle.test_span_engine import HEAD_ON_ANCHOR, PROMPT, SMALL_QWEN, THREE_LAYERS, driven
from tests.oracle.test_text_engine import write_model
from tests.span_route import TextDriver, route_of
from tests.span_workers import SpanWorkerThread

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

CHUNK, NUM_TOKENS = 8, 6
NUM_PASSES = -(-len(PROMPT) // CHUNK) + NUM_TOKENS - 1
"""Number of passes of one request: the chunks of its prompt, the last of which gives the first
token, then one per token.
"""
NUM_ROWS = len(PROMPT) + NUM_TOKENS - 1
SPLITS = {**THREE_LAYERS, "head on anchor": HEAD_ON_ANCHOR[2]}
HELD_S = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SMALL_QWEN, tmp_path_factory.mktemp("qwen"))


def own_figures(driver: TextDriver) -> SpanFigures:
    figures = driver.engine.stats().spans
    assert figures is not None
    return figures


def answer_one(driver: TextDriver, name: str) -> None:
    driver.submit(name, PROMPT, Sampling(max_tokens=NUM_TOKENS))
    driver.run()
    route = route_of(driver)
    driver.settle(lambda: all(worker.is_idle for worker in route.worker_at))


def counts_of(sums: PassSums) -> tuple[int, int]:
    return sums.num_passes, sums.num_rows


def recent_of(worker: SpanWorkerThread) -> PassSums:
    return worker.hosting.tally.sums()[1]


@pytest.mark.parametrize("name", SPLITS)
def test_every_process_counts_each_pass_and_row_once(name: str, folder: Path) -> None:
    with driven(folder, SPLITS[name], prefill_chunk_tokens=CHUNK) as driver:
        for number in (1, 2):
            answer_one(driver, f"r{number}")
            own, every = own_figures(driver), (number * NUM_PASSES, number * NUM_ROWS)
            assert counts_of(own.total) == counts_of(own.recent) == every
            for worker in route_of(driver).worker_at:
                total, recent = worker.hosting.tally.sums()
                assert counts_of(total) == counts_of(recent) == every
                assert total.computed_us > 0 and total.waited_us >= 0 and total.took_us == 0
            assert own.total.took_us >= own.total.computed_us > 0


@pytest.mark.parametrize("name", SPLITS)
def test_bytes_are_those_of_the_connections_and_all_that_is_sent_is_received(
    name: str, folder: Path
) -> None:
    with driven(folder, SPLITS[name], prefill_chunk_tokens=CHUNK) as driver:
        answer_one(driver, "r")
        route = route_of(driver)

        def in_flight() -> int:
            at_workers = [worker.arrivals.num_bytes for worker in route.worker_at]
            own = own_figures(driver)
            received = own.received_bytes + sum(received for received, _ in at_workers)
            return own.sent_bytes + sum(sent for _, sent in at_workers) - received

        # A sender counts after the kernel has taken the bytes, so that they may be received before.
        driver.settle(lambda: in_flight() == 0)
        own = own_figures(driver)
        assert route.chain is not None
        assert (own.received_bytes, own.sent_bytes) == route.chain.num_bytes
        # Rows are the payloads that the test's chain has counted; headers come on top.
        assert (
            own.sent_bytes > route.chain.num_sent_bytes > 0
            and own.received_bytes > route.chain.num_received_bytes > 0
        )


@pytest.mark.parametrize("name", THREE_LAYERS)
def test_weights_are_those_that_each_process_has_loaded(name: str, folder: Path) -> None:
    with driven(folder, THREE_LAYERS[name]) as driver:
        answer_one(driver, "r")
        layers = [worker.layers for worker in route_of(driver).worker_at]
        for worker, each in zip(route_of(driver).worker_at, layers, strict=True):
            assert each is not None
            assert worker.hosting.weight_bytes == sum(
                weight.nbytes for weight in each.weights().values()
            )
        assert own_figures(driver).weight_bytes > 0


@pytest.mark.parametrize("place", [0, 1])
def test_pass_waits_while_its_worker_computes_another_one(place: int, folder: Path) -> None:
    """A pass waits while its worker computes a different pass; the time in the worker's queue is
    counted as waiting.
    """
    with driven(
        folder, THREE_LAYERS["forward"], prefill_chunk_tokens=CHUNK, max_batch=32
    ) as driver:
        pause, held = threading.Event(), list[int]()
        worker = route_of(driver).worker_at[place]

        def hold(number: int) -> None:
            if not held:
                held.append(number)
                pause.wait(HELD_S)

        worker.on_pass = hold
        answer_one(driver, "r")
        assert recent_of(worker).waited_us >= HELD_S * 1e6
        assert counts_of(recent_of(worker)) == (NUM_PASSES, NUM_ROWS)
        assert own_figures(driver).total.took_us >= HELD_S * 1e6


@pytest.mark.parametrize("name", THREE_LAYERS)
def test_computation_is_counted_where_it_takes_place(name: str, folder: Path) -> None:
    """Computation is counted where it takes place: the time of a slow worker is its own
    computation, and a part of the pass at the anchor.
    """
    with driven(folder, THREE_LAYERS[name], prefill_chunk_tokens=CHUNK) as driver:
        pause, slow = threading.Event(), route_of(driver).worker_at[1]
        slow.observe = lambda layers: setattr(
            layers, "before", lambda _: pause.wait(HELD_S / NUM_PASSES)
        )
        answer_one(driver, "r")
        held_us, own = slow.hosting.tally.sums()[0].computed_us, own_figures(driver).total
        assert held_us >= HELD_S * 1e6
        # Each pass is cut to whole microseconds.
        assert own.took_us - own.computed_us >= held_us - NUM_PASSES


def test_replaced_worker_counts_its_own_passes_and_the_anchor_each_pass_once(folder: Path) -> None:
    with driven(folder, THREE_LAYERS["forward"], prefill_chunk_tokens=CHUNK) as driver:
        answer_one(driver, "r1")
        route = route_of(driver)
        bytes_before, kept = own_figures(driver), route.worker_at[0]
        route.worker_at[1].kill()
        answer_one(driver, "r2")
        assert route.num_replaced == 1
        own = own_figures(driver)
        assert counts_of(own.total) == (2 * NUM_PASSES, 2 * NUM_ROWS)
        assert counts_of(kept.hosting.tally.sums()[0]) == (2 * NUM_PASSES, 2 * NUM_ROWS)
        assert counts_of(route.worker_at[1].hosting.tally.sums()[0]) == (NUM_PASSES, NUM_ROWS)
        assert route.chain is not None
        received, sent = route.chain.num_bytes
        assert (
            own.received_bytes >= bytes_before.received_bytes + received
            and own.sent_bytes >= bytes_before.sent_bytes + sent
        )


def test_failed_pass_is_not_counted(folder: Path) -> None:
    with driven(folder, THREE_LAYERS["forward"]) as driver:
        answer_one(driver, "good")
        worker = route_of(driver).worker_at[1]
        before, own_before = worker.hosting.tally.sums()[0], own_figures(driver).total
        assert worker.layers is not None

        def fail(_: object) -> None:
            raise RuntimeError("no such kernel")

        worker.layers.before = fail
        driver.submit("bad", PROMPT, Sampling(max_tokens=NUM_TOKENS))
        driver.run()
        assert "bad" in driver.errors
        assert worker.hosting.tally.sums()[0] == before and counts_of(
            own_figures(driver).total
        ) == counts_of(own_before)
