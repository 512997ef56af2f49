"""The places of span workers in a new route: each gets its span over its connection, loads it, and says that it is ready."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet.core.errors import FleetError
from fleet.core.span_messages import Returned, SpanReady, SpanRefusal, SpanSetup, decode_span_message, encode_span_message
from fleet.spans.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection

POLL_S = 0.25


class RouteFailure(FleetError):
    """A route could not be set up; the message says why. Another attempt follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlaces:
    """The places of one route. `spans` and `workers`: in the order of the layers; the others: see `SpanSetup`."""

    generation: int
    lineage: int
    spans: Sequence[str]
    workers: Sequence[str]
    num_pages: int
    page_size: int
    returned: Returned
    wire_dtype: str
    keep_bytes: int

    def setups(self) -> list[SpanSetup]:
        following = [*self.workers[1:], ""]
        return [
            SpanSetup(
                generation=self.generation, lineage=self.lineage, span=span, following=after, num_pages=self.num_pages,
                page_size=self.page_size, returned=self.returned, wire_dtype=self.wire_dtype, keep_bytes=self.keep_bytes,
            )
            for span, after in zip(self.spans, following, strict=True)
        ]  # fmt: skip


def place_workers(
    places: RoutePlaces, connections: Sequence[SpanConnection], arrivals: SpanArrivals, *, timeout_s: float,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[SpanReady]:  # fmt: skip
    """Give each worker its place, and wait until all have loaded their spans. Raises: RouteFailure."""
    for connection, setup in zip(connections, places.setups(), strict=True):
        connection.send(encode_span_message(setup))
    ready: dict[SpanConnection, SpanReady] = {}
    until_s = time.monotonic() + timeout_s
    while len(ready) < len(connections):
        if is_stopping() or time.monotonic() > until_s:
            raise RouteFailure("span workers did not load their layers in time")
        for arrival in arrivals.take(POLL_S):
            if isinstance(arrival, ConnectionClosed):
                raise RouteFailure(f"span worker {arrival.connection.peer} is gone: {arrival.reason}")
            if isinstance(arrival, FrameReceived):
                ready |= _ready_of(arrival, places.generation)
    return [ready[connection] for connection in connections]


def _ready_of(arrival: FrameReceived, generation: int) -> dict[SpanConnection, SpanReady]:
    """Return the answer of a worker that has taken its place; nothing for another message. Raises: RouteFailure if it refuses."""
    message = decode_span_message(arrival.frame.header)
    if isinstance(message, SpanRefusal):
        raise RouteFailure(f"span worker {arrival.connection.peer} refuses: {message.message}")
    if isinstance(message, SpanReady) and message.generation == generation:
        return {arrival.connection: message}
    return {}
