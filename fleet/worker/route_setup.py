"""Setup of a route's connections: each span worker gets its place, and answers once it has loaded its span. Knows no Redis."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet.core.errors import FleetError
from fleet.core.ids import WorkerId
from fleet.core.span_messages import Returned, SpanReady, SpanRefusal, SpanSetup, decode_span_message, encode_span_message
from fleet.spans.chain import ConnectedChain
from fleet.spans.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.dial import dial
from fleet.worker.span_purposes import FROM_ANCHOR

CHECK_S = 0.25
DIAL_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 1800.0


class RouteFailure(Exception):
    """A route could not be set up; the message says why. Another attempt follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHop:
    """A span worker of a route: where it listens, the key of connections to it, and the span that it is to host."""

    worker: WorkerId
    address: tuple[str, int]
    key: bytes
    span: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTerms:
    """The part of `SpanSetup` that is the same for all workers of a route."""

    generation: int
    lineage: int
    num_pages: int
    page_size: int
    returned: Returned
    wire_dtype: str
    keep_bytes: int


def set_up_route(
    anchor: WorkerId, hops: Sequence[RouteHop], terms: RouteTerms, check: Callable[[], None] = lambda: None
) -> ConnectedChain:
    """Connect to the workers, in the order of the layers, and wait until all have loaded their spans.

    `check` is called while this waits, and raises RouteFailure to end it: a frozen worker answers nothing, and its connection
    stays open. Raises: RouteFailure, errors of `check`; the connections are closed then.
    """
    arrivals, connections = SpanArrivals(), list[SpanConnection]()
    try:
        for hop in hops:
            connections.append(
                dial(
                    hop.address, key=hop.key, own_name=anchor, purpose=FROM_ANCHOR, arrivals=arrivals, timeout_s=DIAL_TIMEOUT_S
                )
            )  # fmt: skip
        ready = _place(hops, terms, connections, arrivals, check)
    except BaseException as error:
        for connection in connections:
            connection.close()
        if isinstance(error, FleetError):
            raise RouteFailure(error.message) from error
        raise
    return ConnectedChain(terms.generation, connections, ready, arrivals)


def _place(
    hops: Sequence[RouteHop], terms: RouteTerms, connections: Sequence[SpanConnection], arrivals: SpanArrivals,
    check: Callable[[], None],
) -> list[SpanReady]:  # fmt: skip
    """Give each worker its place, and return their answers."""
    following = [*(hop.worker for hop in hops[1:]), ""]
    for connection, hop, after in zip(connections, hops, following, strict=True):
        setup = SpanSetup(
            generation=terms.generation, span=hop.span, following=after, num_pages=terms.num_pages, page_size=terms.page_size,
            returned=terms.returned, wire_dtype=terms.wire_dtype, lineage=terms.lineage, keep_bytes=terms.keep_bytes,
        )  # fmt: skip
        connection.send(encode_span_message(setup))
    ready: dict[SpanConnection, SpanReady] = {}
    until_s = time.monotonic() + LOAD_TIMEOUT_S
    while len(ready) < len(connections):
        check()
        if time.monotonic() > until_s:
            raise RouteFailure("span workers did not load their layers in time")
        for arrival in arrivals.take(CHECK_S):
            if isinstance(arrival, ConnectionClosed):
                raise RouteFailure(f"span worker {arrival.connection.peer} is gone: {arrival.reason}")
            if isinstance(arrival, FrameReceived):
                ready |= _ready_of(arrival, terms.generation)
    return [ready[connection] for connection in connections]


def _ready_of(arrival: FrameReceived, generation: int) -> dict[SpanConnection, SpanReady]:
    """Return the answer of a worker that has its place; nothing for another message. Raises: RouteFailure if it refuses."""
    message = decode_span_message(arrival.frame.header)
    if isinstance(message, SpanRefusal):
        raise RouteFailure(message.message)
    if isinstance(message, SpanReady) and message.generation == generation:
        return {arrival.connection: message}
    return {}
