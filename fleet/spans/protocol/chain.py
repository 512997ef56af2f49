"""The span workers of an anchor's route as its engine uses them, and the place where the next chain
is left for it.

Knows no connection, no tensor library and no Redis.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.core.errors import FleetError
from fleet.spans.protocol.messages import AnySpanMessage, SpanFetch, SpanPass, SpanReport, SpanStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanArrival:
    """A message from a worker of the route, with its rows. `at_s`: time of arrival, by
    `time.monotonic`.
    """

    message: AnySpanMessage
    payload: memoryview
    at_s: float


class SpanChain(Protocol):
    """The span workers of one route. Not thread-safe, but for `is_broken` and `close`."""

    @property
    def generation(self) -> int: ...

    @property
    def num_hops(self) -> int: ...

    @property
    def is_broken(self) -> bool:
        """True once a worker of the route is gone."""
        ...

    @property
    def is_lost(self) -> bool:
        """True once it is broken by the death of a worker: one that leaves, or a route that was
        closed here, is no such case.
        """
        return self.is_broken

    @property
    def first_has(self) -> int:
        """Number of the last pass that the first worker has computed."""
        ...

    def start(self, completed: int, tables: Sequence[int]) -> None:
        """Let the workers send again what others lack; see `SpanStart`."""
        ...

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that were received from the workers, and sent to them."""
        ...

    def send(
        self,
        message: SpanPass | SpanReport,
        *rows: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a pass, or a report, to the first worker, without waiting; the rows must not change
        afterwards.

        `when_sent` is called once it is sent, by any thread.
        """
        ...

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        """Return what has arrived, waiting for the first up to the time."""
        ...

    def layers_of(self, hop: int) -> range:
        """Return the numbers of a worker's layers."""
        ...

    def send_to(self, hop: int, message: SpanFetch | SpanStore, *rows: memoryview) -> None:
        """Send a message to one worker, besides the passes."""
        ...

    def break_off(self, why: str) -> None:
        """Break the chain as by the death of a worker, one of which has sent something damaged."""
        ...

    def close(self) -> None: ...


class DelegatingChain(SpanChain):
    """A chain that passes every call on: base class of chains that observe another."""

    def __init__(self, chain: SpanChain) -> None:
        self._chain = chain

    @property
    def generation(self) -> int:
        return self._chain.generation

    @property
    def num_hops(self) -> int:
        return self._chain.num_hops

    @property
    def is_broken(self) -> bool:
        return self._chain.is_broken

    @property
    def is_lost(self) -> bool:
        return self._chain.is_lost

    @property
    def first_has(self) -> int:
        return self._chain.first_has

    def start(self, completed: int, tables: Sequence[int]) -> None:
        self._chain.start(completed, tables)

    @property
    def num_bytes(self) -> tuple[int, int]:
        return self._chain.num_bytes

    def send(
        self,
        message: SpanPass | SpanReport,
        *rows: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        self._chain.send(message, *rows, when_sent=when_sent)

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        return self._chain.take(timeout_s)

    def layers_of(self, hop: int) -> range:
        return self._chain.layers_of(hop)

    def send_to(self, hop: int, message: SpanFetch | SpanStore, *rows: memoryview) -> None:
        self._chain.send_to(hop, message, *rows)

    def break_off(self, why: str) -> None:
        self._chain.break_off(why)

    def close(self) -> None:
        self._chain.close()


class RouteSlot:
    """Thread-safe. Holds at most one chain that the engine has not taken; one that is replaced is
    closed.

    `num_layers` of the whole model; `num_pages`, `page_size` of the anchor's KV pool.
    """

    def __init__(self, *, num_layers: int, num_pages: int, page_size: int) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self._lock = threading.Lock()
        self._next: SpanChain | None = None
        self._outage: FleetError | None = None

    def offer(self, chain: SpanChain) -> None:
        """Leave a chain, in place of one that the engine has not taken."""
        with self._lock:
            replaced, self._next = self._next, chain
            self._outage = None
        if replaced is not None:
            replaced.close()

    def take_chain(self) -> SpanChain | None:
        """Return the next chain, once."""
        with self._lock:
            taken, self._next = self._next, None
        return taken

    def report_outage(self, error: FleetError | None) -> None:
        """Set the error with which requests fail from now on, or None."""
        self._outage = error

    def outage(self) -> FleetError | None:
        """Return the error for requests once layers have been missing for too long."""
        return self._outage
