"""Setup of a route over connections: an anchor sends each span worker its place, or a span to load
for later, and waits until all have answered.

Knows no Redis.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from fleet.core.errors import FleetError
from fleet.core.ids import WorkerId
from fleet.spans.net.connection import (
    Arrival,
    ConnectionClosed,
    FrameReceived,
    SpanArrivals,
    SpanConnection,
)
from fleet.spans.net.dial import dial
from fleet.spans.net.ring import BlockReads
from fleet.spans.protocol.messages import (
    FROM_ANCHOR,
    AnySpanMessage,
    SpanPrepare,
    SpanPrepared,
    SpanReady,
    SpanRefusal,
    SpanSetup,
    decode_span_message,
    encode_span_message,
)
from fleet.spans.route.connections import ConnectedChain
from fleet.spans.route.division import RouteFailure, RouteWorker

CHECK_S = 0.25
DIAL_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 1800.0
AnswerT = TypeVar("AnswerT")


def set_up_route(
    anchor: WorkerId,
    hops: Sequence[RouteWorker],
    terms: SpanSetup,
    is_stopping: Callable[[], bool] = lambda: False,
    blocks: BlockReads | None = None,
) -> ConnectedChain:
    """Connect to the span workers, send each its place, wait until all have loaded their spans, and
    return the route's chain.

    `hops`: workers in the order of the layers. `terms`: setup that is common to all workers.
    `is_stopping` is called every `CHECK_S` while workers load, and returns True to give up.
    `blocks`: see `SpanArrivals`. Raises: RouteFailure, after all connections are closed.
    """
    arrivals, connections = SpanArrivals(blocks), list[SpanConnection]()
    with _closing(connections):
        _connect(anchor, hops, arrivals, connections)
        following = [*(hop.worker for hop in hops[1:]), ""]
        for connection, hop, after in zip(connections, hops, following, strict=True):
            setup = msgspec.structs.replace(terms, span=hop.span, following=after)
            connection.send(encode_span_message(setup))

        def ready_of(message: AnySpanMessage) -> SpanReady | None:
            return (
                message
                if isinstance(message, SpanReady) and message.generation == terms.generation
                else None
            )

        ready = _await_each(connections, arrivals, ready_of, is_stopping)
    return ConnectedChain(terms.generation, connections, ready, arrivals)


def prepare_spans(
    anchor: WorkerId, hops: Sequence[RouteWorker], is_stopping: Callable[[], bool]
) -> None:
    """Let workers load the spans in `hops` beside the spans in use, and wait until all have.

    Raises: RouteFailure.
    """
    arrivals, connections = SpanArrivals(), list[SpanConnection]()
    with _closing(connections):
        _connect(anchor, hops, arrivals, connections)
        for connection, hop in zip(connections, hops, strict=True):
            connection.send(encode_span_message(SpanPrepare(generation=0, span=hop.span)))
        for answer in _await_each(connections, arrivals, _prepared_of, is_stopping):
            if answer.error:
                raise RouteFailure(answer.error)
    for connection in connections:
        connection.close()


def _prepared_of(message: AnySpanMessage) -> SpanPrepared | None:
    return message if isinstance(message, SpanPrepared) else None


@contextmanager
def _closing(connections: Sequence[SpanConnection]) -> Generator[None]:
    """Context manager that closes the connections if its block fails, and turns a FleetError into a
    RouteFailure.
    """
    try:
        yield
    except BaseException as error:
        for connection in connections:
            connection.close()
        if isinstance(error, FleetError):
            raise RouteFailure(error.message) from error
        raise


def _connect(
    anchor: WorkerId,
    hops: Sequence[RouteWorker],
    arrivals: SpanArrivals,
    connections: list[SpanConnection],
) -> None:
    """Connect to each worker, and append the connections to `connections`."""
    for hop in hops:
        connections.append(
            dial(
                hop.address,
                key=hop.key,
                own_name=anchor,
                purpose=FROM_ANCHOR,
                arrivals=arrivals,
                timeout_s=DIAL_TIMEOUT_S,
            )
        )


def _await_each(
    connections: Sequence[SpanConnection],
    arrivals: SpanArrivals,
    read: Callable[[AnySpanMessage], AnswerT | None],
    is_stopping: Callable[[], bool],
) -> list[AnswerT]:
    """Wait until every worker has answered; return the answers in the order of the connections.

    `read` returns the answer in a message, or None for an unrelated message. Raises: RouteFailure
    if a worker refuses or is gone, or if the setup takes too long.
    """
    answers: dict[SpanConnection, AnswerT] = {}
    until_s = time.monotonic() + LOAD_TIMEOUT_S
    while len(answers) < len(connections):
        if is_stopping() or time.monotonic() > until_s:
            raise RouteFailure(
                "the setup of the route was given up: a span worker is lost or loads for too "
                "long, or the anchor stops"
            )
        for arrival in arrivals.take(CHECK_S):
            answer = _read(arrival, read)
            if answer is not None:
                answers[arrival.connection] = answer
    return [answers[connection] for connection in connections]


def _read(arrival: Arrival, read: Callable[[AnySpanMessage], AnswerT | None]) -> AnswerT | None:
    if isinstance(arrival, ConnectionClosed):
        raise RouteFailure(f"span worker {arrival.connection.peer} is gone: {arrival.reason}")
    if not isinstance(arrival, FrameReceived):
        return None
    message = decode_span_message(arrival.frame.header)
    if isinstance(message, SpanRefusal):
        raise RouteFailure(message.message)
    return read(message)
