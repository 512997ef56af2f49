"""The connections of an anchor to the span workers of its route."""

import logging
from collections.abc import Callable, Sequence

from fleet.core.errors import UnknownWireVersion
from fleet.spans.net.connection import FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.protocol.chain import SpanArrival, SpanChain
from fleet.spans.protocol.messages import (
    SpanFetch,
    SpanPass,
    SpanReady,
    SpanReport,
    SpanStart,
    SpanStore,
    decode_span_message,
    encode_span_message,
)

log = logging.getLogger(__name__)


class ConnectedChain(SpanChain):
    """An anchor's route as open connections to its span workers; implements `SpanChain` for the
    engine.

    `connections`, `ready`: connection and `SpanReady` answer of each worker, in the order of the
    layers. `arrivals`: queue that receives the messages of all connections.
    """

    def __init__(
        self,
        generation: int,
        connections: Sequence[SpanConnection],
        ready: Sequence[SpanReady],
        arrivals: SpanArrivals,
    ) -> None:
        self._generation = generation
        self._connections = connections
        self._ready = ready
        self._arrivals = arrivals
        self._expects_end = False

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def num_hops(self) -> int:
        return len(self._connections)

    @property
    def is_broken(self) -> bool:
        return any(connection.is_closed for connection in self._connections)

    @property
    def is_lost(self) -> bool:
        return self.is_broken and not self._expects_end

    def expect_end(self) -> None:
        """Record that the route is about to end without a worker's death, so that `is_lost` stays
        False. Has no effect on a route that is already broken. Any thread may call this.
        """
        self._expects_end = self._expects_end or not self.is_broken

    @property
    def first_has(self) -> int:
        return self._ready[0].last_number

    def start(self, completed: int, tables: Sequence[int]) -> None:
        following = [*(ready.last_number for ready in self._ready[1:]), 0]
        for connection, has in zip(self._connections, following, strict=True):
            start = SpanStart(
                generation=self._generation,
                following_has=has,
                completed=completed,
                tables=tuple(tables),
            )
            connection.send(encode_span_message(start))

    @property
    def num_bytes(self) -> tuple[int, int]:
        return self._arrivals.num_bytes

    def send(
        self,
        message: SpanPass | SpanReport,
        *rows: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        self._connections[0].send(encode_span_message(message), *rows, when_sent=when_sent)

    def layers_of(self, hop: int) -> range:
        ready = self._ready[hop]
        return range(ready.first_layer, ready.first_layer + ready.num_layers)

    def send_to(self, hop: int, message: SpanFetch | SpanStore, *rows: memoryview) -> None:
        self._connections[hop].send(encode_span_message(message), *rows)

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        arrived: list[SpanArrival] = []
        for each in self._arrivals.take(timeout_s):
            if not isinstance(each, FrameReceived):
                continue
            try:
                message = decode_span_message(each.frame.header)
            except UnknownWireVersion as error:
                self.break_off(f"{each.connection.peer}: {error.message}")
                break
            arrived.append(SpanArrival(message=message, payload=each.frame.payload, at_s=each.at_s))
        return arrived

    def break_off(self, why: str) -> None:
        log.warning("route %d is broken off: %s", self._generation, why)
        self._close_connections()

    def close(self) -> None:
        self.expect_end()
        self._close_connections()

    def _close_connections(self) -> None:
        for connection in self._connections:
            connection.close()
