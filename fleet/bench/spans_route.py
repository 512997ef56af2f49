"""The route of a measured anchor: its span workers are placed by their addresses, and what its passes are is recorded.

Knows no Redis: the measurement knows every process that it starts.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec

from fleet.bench.errors import BenchError
from fleet.bench.spans_protocol import Extents, SpanReply
from fleet.config.schema import SpansConfig
from fleet.core.ids import WorkerId
from fleet.core.span_messages import (
    SpanPass,
    SpanReady,
    SpanRefusal,
    SpanResult,
    SpanSetup,
    decode_span_message,
    encode_span_message,
)
from fleet.engine.span_chain import RouteSlot, SpanArrival, SpanChain
from fleet.engine.torch.build import DTYPES
from fleet.spans.chain import ConnectedChain
from fleet.spans.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.dial import dial
from fleet.stages.base import AnchorOptions
from fleet.worker.span_purposes import FROM_ANCHOR

GENERATION = 1
DIAL_S = 5.0
LOAD_S = 600.0
US = 1e-6


class RecordingChain(SpanChain):
    """A chain that records each pass: its rows, and the time from its sending to its result without the workers' computation."""

    def __init__(self, chain: SpanChain, item_bytes: int) -> None:
        """`item_bytes`: of a number in a row."""
        self._chain, self._item_bytes = chain, item_bytes
        self.row_width = 0
        self._sent_s: dict[int, float] = {}
        self.clear()

    def clear(self) -> None:
        self.passes: list[Extents] = []
        self.draws: list[tuple[bool, ...]] = []
        self.hop_s: list[float] = []

    def recorded(self, reply: SpanReply) -> SpanReply:
        """Return a reply with what was recorded since `clear`."""
        return msgspec.structs.replace(
            reply, passes=tuple(self.passes), draws=tuple(self.draws), row_width=self.row_width, hop_s=tuple(self.hop_s)
        )

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
    def first_has(self) -> int:
        return self._chain.first_has

    def start(self, completed: int, tables: Sequence[int]) -> None:
        self._chain.start(completed, tables)

    def send(self, message: SpanPass, *rows: memoryview) -> None:
        if message.extents:
            self.passes.append(tuple((extent.table, extent.start, extent.stop) for extent in message.extents))
            self.draws.append(tuple(extent.draws for extent in message.extents))
            num_rows = sum(extent.stop - extent.start for extent in message.extents)
            self.row_width = sum(part.nbytes for part in rows) // num_rows // self._item_bytes
            self._sent_s[message.number] = time.perf_counter()
        self._chain.send(message, *rows)

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        arrivals = self._chain.take(timeout_s)
        now_s = time.perf_counter()
        for arrival in arrivals:
            result = arrival.message
            if isinstance(result, SpanResult) and (sent_s := self._sent_s.pop(result.number, None)) is not None:
                self.hop_s.append(now_s - sent_s - US * sum(hop.computed_us for hop in result.times))
        return arrivals

    def close(self) -> None:
        self._chain.close()


def set_up_route(
    addresses: Mapping[str, tuple[str, int]], key: bytes, anchor: str, spans: SpansConfig, options: AnchorOptions, slot: RouteSlot
) -> RecordingChain:
    """Give each worker its place in a route, and leave the chain for the engine. Raises: BenchError, SpanUnreachable."""
    arrivals = SpanArrivals()
    connections = [
        dial(address, key=key, own_name=anchor, purpose=FROM_ANCHOR, arrivals=arrivals, timeout_s=DIAL_S)
        for address in addresses.values()
    ]
    following = [*list(addresses)[1:], ""]
    for connection, span, after in zip(connections, spans.worker_spans, following, strict=True):
        setup = SpanSetup(
            generation=GENERATION, span=str(span), following=WorkerId(after), num_pages=slot.num_pages, page_size=slot.page_size,
            returned=options.returned, wire_dtype=options.wire_dtype, lineage=GENERATION, keep_bytes=options.keep_bytes,
        )  # fmt: skip
        connection.send(encode_span_message(setup))
    chain = ConnectedChain(GENERATION, connections, _await_ready(connections, arrivals), arrivals)
    recording = RecordingChain(chain, DTYPES[options.wire_dtype].itemsize)
    slot.offer(recording)
    return recording


def _await_ready(connections: Sequence[SpanConnection], arrivals: SpanArrivals) -> list[SpanReady]:
    """Wait until every worker has loaded its span. Raises: BenchError if one cannot."""
    ready: dict[SpanConnection, SpanReady] = {}
    until_s = time.monotonic() + LOAD_S
    while len(ready) < len(connections):
        if time.monotonic() > until_s:
            raise BenchError(f"span workers did not load their layers within {LOAD_S:g} s")
        for arrival in arrivals.take(1.0):
            if isinstance(arrival, ConnectionClosed):
                raise BenchError(f"span worker {arrival.connection.peer} is gone: {arrival.reason}")
            message = decode_span_message(arrival.frame.header) if isinstance(arrival, FrameReceived) else None
            if isinstance(message, SpanRefusal):
                raise BenchError(f"span worker {arrival.connection.peer}: {message.message}")
            if isinstance(message, SpanReady):
                ready[arrival.connection] = message
    return [ready[connection] for connection in connections]
