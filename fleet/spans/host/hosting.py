"""A span worker's part in a route: accepts setups, computes steps, sends results on. Knows no
Redis.

All work is driven by arrivals on the connections; one thread calls `handle`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from fleet.core.errors import (
    BadInput,
    FleetError,
    SpanPrefixMismatch,
    UnknownWireVersion,
    failure_of,
)
from fleet.core.ids import WorkerId
from fleet.engine.torch.build import DTYPES, ComputeDevice
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.pass_queue import FAILURES
from fleet.spans.host.compute import HostedRows, SpanHost
from fleet.spans.host.copies import copy_rows
from fleet.spans.host.loaded import LoadedSpans
from fleet.spans.host.route import HostedRoute
from fleet.spans.net.connection import (
    Arrival,
    ConnectionClosed,
    ConnectionOpened,
    FrameReceived,
    SpanConnection,
)
from fleet.spans.protocol.figures import PassSums, PassTally
from fleet.spans.protocol.messages import (
    FROM_ANCHOR,
    HopTime,
    SpanError,
    SpanFetch,
    SpanMessage,
    SpanPass,
    SpanPrepare,
    SpanPrepared,
    SpanReady,
    SpanRefusal,
    SpanReport,
    SpanResult,
    SpanSetup,
    SpanStart,
    SpanStore,
    SpanTapped,
    decode_span_message,
    encode_span_message,
    purpose_of_hop,
)
from fleet.spans.protocol.pass_log import SpanLog
from fleet.spans.torch.wire_rows import check_rows, rows_from_wire, rows_to_wire
from fleet.stages.base import BuiltSpan

log = logging.getLogger(__name__)


class DamagedMessage(FleetError):
    """A peer sent a message that contradicts itself or the route. Its connection is closed, and the
    anchor sets up the route again.
    """


class Neighbours(Protocol):
    """Opens connections to other span workers."""

    def connect(self, worker: WorkerId, purpose: str) -> SpanConnection:
        """Return a connection to another span worker. Raises: SpanUnreachable; errors of Redis."""
        ...


class SpanHosting:
    """A span worker's place in a route: receives messages of the anchor and of neighbours, and
    answers.

    The rows of a route that has ended are kept until the next setup, which may resume them. The
    loaded span outlives routes.
    """

    def __init__(
        self,
        where: ComputeDevice,
        spans: LoadedSpans,
        neighbours: Neighbours,
        when_loading: Callable[[], None],
    ) -> None:
        """Begin without a route. `neighbours`: dialer for connections to other span workers.
        `when_loading`: called before a route's span is loaded, which may take minutes.
        """
        self._where = where
        self._spans = spans
        self._neighbours = neighbours
        self._when_loading = when_loading
        self._like = torch.empty(0, dtype=where.dtype, device=where.device)
        self._connections: dict[SpanConnection, str] = {}
        self._late: set[SpanConnection] = set()
        """Connections from which messages of an ended route have arrived; logged once for each."""
        self._generation = 0
        self._has_started = False
        self._is_open = False
        self._following_has = 0
        self._early: list[tuple[SpanPass | SpanReport, memoryview, float]] = []
        """Steps and reports that arrived before `SpanStart`: message, rows, time of arrival."""
        self.tally = PassTally()
        self.route: HostedRoute | None = None

    @property
    def is_in_route(self) -> bool:
        """True while an anchor computes with this worker."""
        return self._is_open

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded weights. Any thread may read this."""
        return self._spans.num_bytes

    def is_of_route(self, connection: SpanConnection) -> bool:
        """Return True for the connections over which the route's steps arrive and leave."""
        route = self.route
        is_end = route is not None and connection in (route.anchor, route.following)
        is_hop = self._connections.get(connection) == purpose_of_hop(self._generation)
        return self._is_open and (is_end or is_hop)

    def handle(self, arrival: Arrival) -> None:
        """Handle an arrival. A message from a closed connection is ignored, since its route has
        ended; missing steps and results are sent again in the next route.
        """
        match arrival:
            case ConnectionOpened(connection=connection, purpose=purpose):
                self._connections[connection] = purpose
            case ConnectionClosed(connection=connection, reason=reason):
                is_of_route = self.is_of_route(connection)
                purpose = self._connections.pop(connection, "")
                self._late.discard(connection)
                if is_of_route:
                    self._leave(f"the connection to {connection.peer} is closed ({reason})")
                elif purpose not in ("", FROM_ANCHOR):
                    log.info(
                        "the connection from %s, of a route that has ended, is closed (%s)",
                        connection.peer,
                        reason,
                    )
            case FrameReceived(connection=connection) if connection.is_closed:
                return
            case FrameReceived(connection=connection, frame=frame, at_s=at_s):
                try:
                    self._receive(
                        connection, decode_span_message(frame.header), frame.payload, at_s
                    )
                except (UnknownWireVersion, DamagedMessage) as error:
                    log.warning(
                        "the connection to %s is closed: %s", connection.peer, error.message
                    )
                    connection.close()

    def close(self) -> None:
        """Leave the route, and close the connections that `handle` knows;
        `SpanArrivals.close_connections` closes the rest.
        """
        self._leave("this worker ends")
        for connection in [*self._connections]:
            connection.close()

    def _receive(
        self, connection: SpanConnection, message: SpanMessage, payload: memoryview, at_s: float
    ) -> None:
        purpose, route = self._connections.get(connection), self.route
        if isinstance(message, SpanSetup):
            if purpose == FROM_ANCHOR:
                self._set_up(connection, message)
        elif isinstance(message, SpanPrepare):
            if purpose == FROM_ANCHOR:
                self._prepare(connection, message)
        elif route is None or not self._is_open or message.generation != self._generation:
            self._refuse(connection, message)
        elif isinstance(message, SpanStart) and purpose == FROM_ANCHOR:
            self._start(route, message)
        elif isinstance(message, SpanFetch | SpanStore) and purpose == FROM_ANCHOR:
            copy_rows(route.host, route.anchor, message, payload)
        elif isinstance(message, SpanPass | SpanReport) and purpose in (
            FROM_ANCHOR,
            purpose_of_hop(self._generation),
        ):
            if self._has_started:
                self._advance(route, message, payload, at_s)
            else:
                self._early.append((message, payload, at_s))

    def _refuse(self, connection: SpanConnection, message: SpanMessage) -> None:
        """Ignore a message of an ended route, and log it once per connection: the sender has not
        left yet.
        """
        if connection not in self._late:
            self._late.add(connection)
            log.info(
                "messages of route %d from %s arrive late, and are refused: this worker is in "
                "route %d%s",
                message.generation,
                connection.peer,
                self._generation,
                "" if self._is_open else ", which has ended",
            )

    def _set_up(self, anchor: SpanConnection, setup: SpanSetup) -> None:
        """Leave the last route and take a place in the new one; answer with `SpanReady` or
        `SpanRefusal`.
        """
        if setup.generation <= self._generation:
            message = (
                f"this worker is in route {self._generation}, which is newer than "
                f"{setup.generation}"
            )
            anchor.send(
                encode_span_message(SpanRefusal(generation=setup.generation, message=message))
            )
            return
        self._leave("its worker is in a newer route")
        self._generation = setup.generation
        self._has_started = False
        self._early = []
        if self.route is not None and not self.route.resumes(setup):
            self.route = None  # its memory is free before that of the new one is allocated
        following: SpanConnection | None = None
        try:
            built = self._built(setup.span)
            if setup.following:
                following = self._neighbours.connect(
                    WorkerId(setup.following), purpose_of_hop(setup.generation)
                )
            self.route = self._route(setup, anchor, following, built)
        except (FleetError, *FAILURES) as error:
            if following is not None:
                following.close()
            failure = failure_of(f"span {setup.span} cannot be hosted", error)
            log.warning("%s", failure.message)
            anchor.send(
                encode_span_message(
                    SpanRefusal(generation=setup.generation, message=failure.message)
                )
            )
            return
        self._is_open = True
        last_number = self.route.host.last_number
        kept = (
            f", and keeps the rows of {self.route.host.num_tables} requests" if last_number else ""
        )
        log.info("route %d: this worker has layers %s%s", setup.generation, setup.span, kept)
        span = built.layers.span
        ready = SpanReady(
            generation=setup.generation,
            num_bytes=built.num_bytes,
            last_number=last_number,
            first_layer=span.first,
            num_layers=span.final - span.first + 1,
        )
        anchor.send(encode_span_message(ready))

    def _built(self, span: str) -> BuiltSpan:
        if not self._spans.has(span):
            self._when_loading()
        return self._spans.use(span)

    def _prepare(self, anchor: SpanConnection, prepare: SpanPrepare) -> None:
        """Load a span for a later route, beside the span in use, and answer with `SpanPrepared`."""

        def answer(failure: FleetError | None) -> None:
            error = failure.message if failure is not None else ""
            anchor.send(
                encode_span_message(
                    SpanPrepared(generation=prepare.generation, span=prepare.span, error=error)
                )
            )

        self._spans.prepare(prepare.span, answer, beside_used=self._is_open)

    def _route(
        self,
        setup: SpanSetup,
        anchor: SpanConnection,
        following: SpanConnection | None,
        built: BuiltSpan,
    ) -> HostedRoute:
        """Return the place in the new route; if it resumes the last one, with that route's rows and
        log.
        """
        if self.route is not None:
            return replace(self.route, setup=setup, anchor=anchor, following=following)
        if setup.wire_dtype not in DTYPES or not setup.num_pages or not setup.page_size:
            pages = f"{setup.num_pages} pages of {setup.page_size} rows"
            raise BadInput(f"a route cannot have {pages}, or rows in {setup.wire_dtype[:64]!r}")
        pool = KVPool(
            built.layers.kv_shape,
            num_pages=setup.num_pages,
            page_size=setup.page_size,
            dtype=self._where.dtype,
            device=self._where.device,
        )
        returned = None if following is not None else setup.returned
        host = SpanHost(built.layers, pool, tiled=self._where.tiled, returned=returned)
        return HostedRoute(
            setup=setup,
            anchor=anchor,
            following=following,
            host=host,
            log=SpanLog(setup.keep_bytes),
            results={},
        )

    def _leave(self, why: str) -> None:
        """Leave the route by closing its connections, which the other members notice. The rows are
        kept for the next route.
        """
        if self.route is None or not self._is_open:
            return
        self._is_open = False
        log.info("route %d ends here: %s", self.route.setup.generation, why)
        for connection in (self.route.anchor, self.route.following):
            if connection is not None:
                connection.close()

    def _start(self, route: HostedRoute, start: SpanStart) -> None:
        """Resend what the next worker, or the anchor, lacks; then compute the steps that arrived
        early.
        """
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
                route.anchor.send(
                    encode_span_message(
                        msgspec.structs.replace(result, generation=self._generation)
                    ),
                    payload,
                )
        early, self._early = self._early, []
        for message, payload, at_s in early:
            self._advance(route, message, payload, at_s)

    def _complete(self, route: HostedRoute, completed: int) -> None:
        for number in [number for number in route.results if number <= completed]:
            del route.results[number]
        route.log.complete(completed)

    def _advance(
        self, route: HostedRoute, message: SpanPass | SpanReport, payload: memoryview, at_s: float
    ) -> None:
        if isinstance(message, SpanPass):
            self._compute(route, message, payload, at_s)
            return
        route.host.close_tables(message.closed)
        route.log.close(message.closed)
        self._complete(route, message.completed)
        if route.following is not None:
            route.following.send(encode_span_message(message))

    def _compute(
        self, route: HostedRoute, work: SpanPass, payload: memoryview, at_s: float
    ) -> None:
        """Compute a step that arrived at `at_s`, and send it on. A failed step is sent on without
        rows, since its pool changes concern every worker.
        """
        if work.number <= route.host.last_number:
            return
        began_s = time.monotonic()
        try:
            route.host.check(work)
            check_rows(
                payload,
                sum(extent.stop - extent.start for extent in work.extents),
                route.setup.wire_dtype,
            )
        except BadInput as error:
            raise DamagedMessage(error.message) from error
        self._complete(route, work.completed)
        done, num_rows = (
            HostedRows(rows=None, tapped_NH=None),
            sum(extent.stop - extent.start for extent in work.extents),
        )
        try:
            route.host.advance(work)
            if work.extents:
                done = route.host.run(
                    work, rows_from_wire(payload, num_rows, route.setup.wire_dtype, self._like)
                )
        except FAILURES as error:
            num_rows, work = (
                0,
                msgspec.structs.replace(work, extents=(), error=_error_of(work, error)),
            )
        rows = _optional_rows(done.rows, route.setup.wire_dtype)
        ended_s = time.monotonic()  # on a GPU the computation ends with that copy
        spent = HopTime(
            waited_us=int(1e6 * (began_s - at_s)), computed_us=int(1e6 * (ended_s - began_s))
        )
        when_sent: Callable[[], None] | None = None
        if num_rows:
            self.tally.add(
                PassSums(
                    num_passes=1,
                    num_rows=num_rows,
                    waited_us=spent.waited_us,
                    computed_us=spent.computed_us,
                )
            )
            when_sent = self.tally.sending(ended_s)
        self._send_results(
            route, msgspec.structs.replace(work, times=(*work.times, spent)), done, rows, when_sent
        )

    def _send_results(
        self,
        route: HostedRoute,
        work: SpanPass,
        done: HostedRows,
        rows: memoryview,
        when_sent: Callable[[], None] | None,
    ) -> None:
        """Send the hidden states of a step to the next worker, or the step's result to the anchor;
        tapped hidden states go to the anchor in any case. `rows`: bytes of `done.rows`.
        """
        tables = tuple(extent.table for extent in work.extents)
        if done.tapped_NH is not None or (work.error is not None and route.host.has_tapped_layer):
            tapped = SpanTapped(generation=work.generation, number=work.number, tables=tables)
            self._return(
                route, work, tapped, _optional_rows(done.tapped_NH, route.setup.wire_dtype)
            )
        if route.following is not None:
            route.log.add(work, rows)
            if work.number > self._following_has:
                route.following.send(encode_span_message(work), rows, when_sent=when_sent)
            return
        result = SpanResult(
            generation=work.generation,
            number=work.number,
            tables=tables,
            num_rows=0 if done.rows is None else len(done.rows),
            error=work.error,
            times=work.times,
        )
        self._return(route, work, result, rows, when_sent)

    def _return(
        self,
        route: HostedRoute,
        work: SpanPass,
        result: SpanResult | SpanTapped,
        payload: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a result to the anchor unless the anchor already has it, and keep the result until
        the anchor reports the step as completed.
        """
        if work.number > work.completed:
            route.results.setdefault(work.number, []).append((result, payload))
            route.anchor.send(encode_span_message(result), payload, when_sent=when_sent)


def _optional_rows(rows: Tensor | None, dtype: str) -> memoryview:
    return rows_to_wire(rows, dtype) if rows is not None else memoryview(b"")


def _error_of(work: SpanPass, error: Exception) -> SpanError:
    failure = failure_of("a span worker failed the request", error)
    if not isinstance(error, FleetError):
        log.error("pass %d of route %d failed", work.number, work.generation, exc_info=error)
    return SpanError(
        code=failure.code, message=failure.message, loses_rows=isinstance(error, SpanPrefixMismatch)
    )
