"""A span worker's part in a route: its place in it, the passes, what it sends on. Knows no Redis.

All is driven by what arrives on the connections; `handle` is called by one thread.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch

from fleet.core.errors import FleetError, SpanPrefixMismatch, UnknownWireVersion, failure_of
from fleet.core.ids import WorkerId
from fleet.core.layer_spans import LayerSpan
from fleet.core.span_messages import (
    HopTime,
    SpanError,
    SpanMessage,
    SpanPass,
    SpanReady,
    SpanRefusal,
    SpanReport,
    SpanResult,
    SpanSetup,
    SpanStart,
    SpanTapped,
    decode_span_message,
    encode_span_message,
)
from fleet.engine.span_log import SpanLog
from fleet.engine.torch.build import ComputeDevice
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.pass_queue import FAILURES
from fleet.engine.torch.span_host import HostedRows, SpanHost
from fleet.engine.torch.wire_rows import rows_from_wire, rows_to_wire
from fleet.spans.connection import Arrival, ConnectionClosed, ConnectionOpened, FrameReceived, SpanConnection
from fleet.stages.base import BuiltSpan
from fleet.worker.span_purposes import FROM_ANCHOR, purpose_of_hop

log = logging.getLogger(__name__)


class Neighbours(Protocol):
    """Opens connections to other span workers."""

    def connect(self, worker: WorkerId, purpose: str) -> SpanConnection:
        """Raises: SpanUnreachable; errors of Redis."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRoute:
    """A route in which this worker has a place. `following`: the connection to the next worker, None for the last one.

    `results`: tapped rows and, of the last worker, results, by the number of the pass: headers and rows.
    """

    setup: SpanSetup
    anchor: SpanConnection
    following: SpanConnection | None
    host: SpanHost
    log: SpanLog
    results: dict[int, list[tuple[SpanResult | SpanTapped, memoryview]]]


class SpanHosting:
    """The worker's present route, and the span that is loaded, which outlives routes.

    A route that has ended by the loss of another member is kept until the anchor sets up the next one, which resumes it.
    """

    def __init__(
        self,
        where: ComputeDevice,
        load: Callable[[LayerSpan], BuiltSpan],
        neighbours: Neighbours,
        when_loading: Callable[[], None],
    ) -> None:
        """`when_loading` is called before a span is loaded, which may take long."""
        self._where, self._load, self._neighbours, self._when_loading = where, load, neighbours, when_loading
        self._like = torch.empty(0, dtype=where.dtype, device=where.device)
        self._connections: dict[SpanConnection, str] = {}
        self._loaded: tuple[str, BuiltSpan] | None = None
        self._generation = 0
        self._has_started = False
        self._is_open = False
        self._following_has = 0
        self._early: list[tuple[SpanPass | SpanReport, memoryview]] = []
        """Messages that arrived before `SpanStart`."""
        self.route: HostedRoute | None = None

    def handle(self, arrival: Arrival) -> None:
        match arrival:
            case ConnectionOpened(connection=connection, purpose=purpose):
                self._connections[connection] = purpose
            case ConnectionClosed(connection=connection, reason=reason):
                purpose, route = self._connections.pop(connection, ""), self.route
                is_of_route = route is not None and connection in (route.anchor, route.following)
                if is_of_route or purpose == purpose_of_hop(self._generation):
                    self._leave(f"the connection to {connection.peer} is closed ({reason})")
            case FrameReceived(connection=connection, frame=frame):
                try:
                    message = decode_span_message(frame.header)
                except UnknownWireVersion as error:
                    log.warning("the connection to %s is closed: %s", connection.peer, error.message)
                    connection.close()
                    return
                self._receive(connection, message, frame.payload)

    def close(self, unhandled: Iterable[Arrival] = ()) -> None:
        """Close every connection, also those that were accepted and not handled: their peers would wait for answers."""
        self._leave("this worker ends")
        opened = [arrival.connection for arrival in unhandled if isinstance(arrival, ConnectionOpened)]
        for connection in [*self._connections, *opened]:
            connection.close()

    def _receive(self, connection: SpanConnection, message: SpanMessage, payload: memoryview) -> None:
        purpose, route = self._connections.get(connection), self.route
        if isinstance(message, SpanSetup):
            if purpose == FROM_ANCHOR:
                self._set_up(connection, message)
        elif route is None or not self._is_open or message.generation != self._generation:
            return
        elif isinstance(message, SpanStart) and purpose == FROM_ANCHOR:
            self._start(route, message)
        elif isinstance(message, SpanPass | SpanReport) and purpose in (FROM_ANCHOR, purpose_of_hop(self._generation)):
            if self._has_started:
                self._advance(route, message, payload)
            else:
                self._early.append((message, payload))

    def _set_up(self, anchor: SpanConnection, setup: SpanSetup) -> None:
        """Take a place in a new route, and leave the last one."""
        if setup.generation <= self._generation:
            message = f"this worker is in route {self._generation}, which is newer than {setup.generation}"
            anchor.send(encode_span_message(SpanRefusal(generation=setup.generation, message=message)))
            return
        self._leave("its worker is in a newer route")
        self._generation, self._has_started, self._early = setup.generation, False, []
        if self.route is not None and not _resumes(setup, self.route.setup):
            self.route = None  # its memory is free before that of the new one is allocated
        following: SpanConnection | None = None
        try:
            built = self._built(setup.span)
            if setup.following:
                following = self._neighbours.connect(WorkerId(setup.following), purpose_of_hop(setup.generation))
            self.route = self._route(setup, anchor, following, built)
        except (FleetError, *FAILURES) as error:
            if following is not None:
                following.close()
            failure = failure_of(f"span {setup.span} cannot be hosted", error)
            log.warning("%s", failure.message)
            anchor.send(encode_span_message(SpanRefusal(generation=setup.generation, message=failure.message)))
            return
        self._is_open = True
        last_number = self.route.host.last_number
        kept = f", and keeps the rows of {self.route.host.num_tables} requests" if last_number else ""
        log.info("route %d: this worker has layers %s%s", setup.generation, setup.span, kept)
        ready = SpanReady(generation=setup.generation, num_bytes=built.num_bytes, last_number=last_number)
        anchor.send(encode_span_message(ready))

    def _built(self, span: str) -> BuiltSpan:
        if self._loaded is None or self._loaded[0] != span:
            self._loaded = None  # its memory is free before the other one is loaded
            self._when_loading()
            self._loaded = span, self._load(LayerSpan.parse(span, "span"))
        return self._loaded[1]

    def _route(self, setup: SpanSetup, anchor: SpanConnection, following: SpanConnection | None, built: BuiltSpan) -> HostedRoute:
        """Return the new place, with the rows of the last route if there is one, which the new one resumes."""
        if self.route is not None:
            return replace(self.route, setup=setup, anchor=anchor, following=following)
        pool = KVPool(
            built.layers.kv_shape, num_pages=setup.num_pages, page_size=setup.page_size, dtype=self._where.dtype,
            device=self._where.device,
        )  # fmt: skip
        returned = None if following is not None else setup.returned
        host = SpanHost(built.layers, pool, tiled=self._where.tiled, returned=returned)
        return HostedRoute(setup=setup, anchor=anchor, following=following, host=host, log=SpanLog(setup.keep_bytes), results={})

    def _leave(self, why: str) -> None:
        """Leave the route, whose other members notice by their connections to this worker. Its rows are kept for the next one."""
        if self.route is None or not self._is_open:
            return
        self._is_open = False
        log.info("route %d ends here: %s", self.route.setup.generation, why)
        for connection in (self.route.anchor, self.route.following):
            if connection is not None:
                connection.close()

    def _start(self, route: HostedRoute, start: SpanStart) -> None:
        """Send again what the next worker, or the anchor, lacks; then compute what has arrived."""
        self._has_started, self._following_has = True, start.following_has
        route.host.resume(start.tables, start.completed)
        route.log.keep_only(start.tables)
        self._complete(route, start.completed)
        if route.following is not None:
            for work, rows in route.log.after(start.following_has):
                again = msgspec.structs.replace(work, generation=self._generation)
                route.following.send(encode_span_message(again), *rows)
        for results in route.results.values():
            for result, payload in results:
                route.anchor.send(encode_span_message(msgspec.structs.replace(result, generation=self._generation)), payload)
        early, self._early = self._early, []
        for message, payload in early:
            self._advance(route, message, payload)

    def _complete(self, route: HostedRoute, completed: int) -> None:
        for number in [number for number in route.results if number <= completed]:
            del route.results[number]
        route.log.complete(completed)

    def _advance(self, route: HostedRoute, message: SpanPass | SpanReport, payload: memoryview) -> None:
        if isinstance(message, SpanPass):
            self._compute(route, message, payload)
            return
        route.host.close_tables(message.closed)
        route.log.close(message.closed)
        self._complete(route, message.completed)
        if route.following is not None:
            route.following.send(encode_span_message(message))

    def _compute(self, route: HostedRoute, work: SpanPass, payload: memoryview) -> None:
        """Compute a pass and send it on. One that fails is sent without rows: its changes of the pool are for every worker."""
        if work.number <= route.host.last_number:
            return
        began_s = time.monotonic()
        self._complete(route, work.completed)
        done = HostedRows(rows=None, tapped_NH=None)
        try:
            route.host.advance(work)
            if work.extents:
                num_rows = sum(extent.stop - extent.start for extent in work.extents)
                done = route.host.run(work, rows_from_wire(payload, num_rows, route.setup.wire_dtype, self._like))
        except FAILURES as error:
            work = msgspec.structs.replace(work, extents=(), error=_error_of(work, error))
        spent = HopTime(waited_us=0, computed_us=int(1e6 * (time.monotonic() - began_s)))
        self._send_results(route, msgspec.structs.replace(work, times=(*work.times, spent)), done)

    def _send_results(self, route: HostedRoute, work: SpanPass, done: HostedRows) -> None:
        dtype, tables = route.setup.wire_dtype, tuple(extent.table for extent in work.extents)
        payload = rows_to_wire(done.rows, dtype) if done.rows is not None else memoryview(b"")
        if done.tapped_NH is not None:
            tapped = SpanTapped(generation=work.generation, number=work.number, tables=tables)
            self._return(route, work, tapped, rows_to_wire(done.tapped_NH, dtype))
        if route.following is not None:
            route.log.add(work, payload)
            if work.number > self._following_has:
                route.following.send(encode_span_message(work), payload)
            return
        result = SpanResult(
            generation=work.generation, number=work.number, tables=tables, num_rows=0 if done.rows is None else len(done.rows),
            error=work.error, times=work.times,
        )  # fmt: skip
        self._return(route, work, result, payload)

    def _return(self, route: HostedRoute, work: SpanPass, result: SpanResult | SpanTapped, payload: memoryview) -> None:
        """Send a result to the anchor, unless it has it; keep it until the anchor says so."""
        if work.number > work.completed:
            route.results.setdefault(work.number, []).append((result, payload))
            route.anchor.send(encode_span_message(result), payload)


def _resumes(setup: SpanSetup, last: SpanSetup) -> bool:
    """Return True if the rows of the last route are those of the new one."""
    same = ("span", "num_pages", "page_size", "returned", "wire_dtype")
    is_same_end = bool(setup.following) == bool(last.following)
    return setup.lineage == last.lineage and is_same_end and all(getattr(setup, name) == getattr(last, name) for name in same)


def _error_of(work: SpanPass, error: Exception) -> SpanError:
    failure = failure_of("a span worker failed the request", error)
    if not isinstance(error, FleetError):
        log.error("pass %d of route %d failed", work.number, work.generation, exc_info=error)
    return SpanError(code=failure.code, message=failure.message, loses_rows=isinstance(error, SpanPrefixMismatch))
