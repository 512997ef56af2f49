"""A span worker with thousands of steps to compute again: the next anchor need not wait."""

from typing import Any, cast

import msgspec
import pytest

from fleet.spans.host.backlog import SpanBacklog
from fleet.spans.net.connection import (
    Arrival,
    ConnectionOpened,
    FrameReceived,
    SpanArrivals,
    SpanConnection,
)
from fleet.spans.net.frames import SpanFrame
from fleet.spans.protocol.messages import (
    FROM_ANCHOR,
    AnySpanMessage,
    SpanReady,
    SpanResult,
    encode_span_message,
)
from tests.echo_span import EXTENT, PASS, ROWS, SETUP, START, RecordingConnection, echo_hosting

NUM_STEPS = 1000


class QueuedArrivals:
    """Double of a process's queue of arrivals."""

    def __init__(self) -> None:
        self.waiting: list[Arrival] = []

    def take(self, _timeout_s: float) -> list[Arrival]:
        taken, self.waiting = self.waiting, []
        return taken

    def open(self) -> RecordingConnection:
        anchor = RecordingConnection()
        self.waiting.append(ConnectionOpened(cast(SpanConnection, anchor), FROM_ANCHOR))
        return anchor

    def send(self, anchor: RecordingConnection, message: AnySpanMessage, rows: bytes = b"") -> None:
        frame = SpanFrame(encode_span_message(message), memoryview(bytearray(rows)))
        self.waiting.append(FrameReceived(cast(SpanConnection, anchor), frame, 0.0))


class Worker:
    """A span worker in a route whose anchor sends `NUM_STEPS` steps, of which none is computed."""

    def __init__(self) -> None:
        self.arrivals = QueuedArrivals()
        self.backlog = SpanBacklog(echo_hosting(), cast(SpanArrivals, cast(Any, self.arrivals)))
        self.anchor = self.arrivals.open()
        self.arrivals.send(self.anchor, SETUP)
        self.handle_all(2)
        self.arrivals.send(self.anchor, START)
        for number in range(1, NUM_STEPS + 1):
            extent = EXTENT if number == 1 else msgspec.structs.replace(EXTENT, table=number)
            step = msgspec.structs.replace(PASS, number=number, extents=(extent,))
            self.arrivals.send(self.anchor, step, ROWS)

    def handle_all(self, num: int) -> None:
        for _ in range(num):
            self.backlog.handle_next(0)

    @property
    def num_computed(self) -> int:
        return sum(isinstance(each, SpanResult) for each in self.anchor.sent)


@pytest.mark.parametrize("is_gone", [True, False], ids=["it has left", "it is frozen"])
def test_the_next_anchor_gets_a_worker_whose_last_one_left_it_many_steps(is_gone: bool) -> None:
    worker = Worker()
    worker.handle_all(10)
    before = worker.num_computed
    if is_gone:
        worker.anchor.is_closed = True
        worker.handle_all(10)
    following = worker.arrivals.open()
    worker.arrivals.send(following, msgspec.structs.replace(SETUP, generation=2, lineage=2))
    worker.handle_all(2)
    assert isinstance(following.sent[0], SpanReady)
    worker.handle_all(2 * NUM_STEPS)
    assert 0 < before == worker.num_computed, "no step of the route that ended was computed"


def test_the_steps_of_a_route_are_computed_in_order() -> None:
    worker = Worker()
    worker.handle_all(5)
    worker.arrivals.open()
    worker.handle_all(NUM_STEPS + 2)
    numbers = [each.number for each in worker.anchor.sent if isinstance(each, SpanResult)]
    assert numbers == list(range(1, NUM_STEPS + 1))
