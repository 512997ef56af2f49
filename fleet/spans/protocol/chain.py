"""Interface of an anchor's engine to the span workers of its route, and the slot in which the
engine finds the next route.

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
    """The span workers of one route, as the anchor's engine sends to and receives from them.
    Workers are numbered by `hop`, from 0 in the order of the layers.

    Not thread-safe, except `is_broken` and `close`.
    """

    @property
    def generation(self) -> int: ...

    @property
    def num_hops(self) -> int: ...

    @property
    def is_broken(self) -> bool:
        """True once the connection to a worker of the route is closed."""
        ...

    @property
    def is_lost(self) -> bool:
        """True if the chain was broken by a worker's death, not by a worker that left or by
        `close`.
        """
        return self.is_broken

    @property
    def first_has(self) -> int:
        """Number of the last step that the first worker has computed."""
        ...

    def start(self, completed: int, tables: Sequence[int]) -> None:
        """Send `SpanStart` to all workers, which resend what their neighbours lack, and begin."""
        ...

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes received from all workers, and bytes sent to all workers."""
        ...

    def send(
        self,
        message: SpanPass | SpanReport,
        *rows: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a step or a report to the first worker, without waiting. The rows must not change
        later.

        `when_sent` is called by any thread once the kernel has taken all bytes.
        """
        ...

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        """Return all messages that have arrived; wait up to `timeout_s` if there is none."""
        ...

    def layers_of(self, hop: int) -> range:
        """Return the layer numbers of worker `hop`."""
        ...

    def send_to(self, hop: int, message: SpanFetch | SpanStore, *rows: memoryview) -> None:
        """Send a copy message to worker `hop` directly, outside the sequence of steps."""
        ...

    def break_off(self, why: str) -> None:
        """Close all connections, as after a worker's death, because a worker sent a damaged
        message. `why`: reason for the log.
        """
        ...

    def close(self) -> None: ...


class DelegatingChain(SpanChain):
    """A chain that forwards every call to another chain: base class of wrappers that observe a
    chain.
    """

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
    """Hand-over of the next route from the thread that sets it up to the engine. Thread-safe. Holds
    at most one chain that the engine has not taken; a replaced chain is closed.

    `num_layers`: layers of the whole model. `num_pages`, `page_size`: size of the anchor's KV pool.
    """

    def __init__(self, *, num_layers: int, num_pages: int, page_size: int) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self._lock = threading.Lock()
        self._next: SpanChain | None = None
        self._outage: FleetError | None = None

    def offer(self, chain: SpanChain) -> None:
        """Store a chain for the engine, close a stored chain that the engine has not taken, and end
        the reported outage.
        """
        with self._lock:
            replaced, self._next = self._next, chain
            self._outage = None
        if replaced is not None:
            replaced.close()

    def take_chain(self) -> SpanChain | None:
        """Return the stored chain and empty the slot; None if it is empty."""
        with self._lock:
            taken, self._next = self._next, None
        return taken

    def report_outage(self, error: FleetError | None) -> None:
        """Set the error with which requests fail from now on; None ends the outage."""
        self._outage = error

    def outage(self) -> FleetError | None:
        """Return the error with which requests fail if layers have been missing for too long, else
        None.
        """
        return self._outage
