"""A span worker's part in a route: its place in it, the passes, what it sends on. Knows no Redis.

All is driven by what arrives on the connections; `handle` is called by one thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from fleet.core.errors import FleetError, SpanPrefixMismatch, failure_of
from fleet.core.ids import WorkerId
from fleet.core.layer_spans import LayerSpan
from fleet.core.span_messages import (
    HopTime,
    SpanFailure,
    SpanMessage,
    SpanPass,
    SpanReady,
    SpanRefusal,
    SpanResult,
    SpanSetup,
    SpanTapped,
    decode_span_message,
    encode_span_message,
)
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
    """A route in which this worker has a place. `following`: the connection to the next worker, None for the last one."""

    setup: SpanSetup
    anchor: SpanConnection
    following: SpanConnection | None
    host: SpanHost


class SpanHosting:
    """The worker's present route, and the span that is loaded, which outlives routes."""

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
        self.route: HostedRoute | None = None

    @property
    def span(self) -> str:
        """The loaded span, "" for none."""
        return self._loaded[0] if self._loaded is not None else ""

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
                self._receive(connection, decode_span_message(frame.header), frame.payload)

    def close(self) -> None:
        """Close every connection."""
        self._leave("this worker ends")
        for connection in list(self._connections):
            connection.close()

    def _receive(self, connection: SpanConnection, message: SpanMessage, payload: memoryview) -> None:
        if isinstance(message, SpanSetup) and self._connections.get(connection) == FROM_ANCHOR:
            self._set_up(connection, message)
        elif isinstance(message, SpanPass) and self._is_upstream(connection):
            if self.route is not None and message.generation == self._generation:
                self._compute(self.route, message, payload)

    def _is_upstream(self, connection: SpanConnection) -> bool:
        return self._connections.get(connection) in (FROM_ANCHOR, purpose_of_hop(self._generation))

    def _set_up(self, anchor: SpanConnection, setup: SpanSetup) -> None:
        """Take a place in a new route, and leave the last one."""
        if setup.generation <= self._generation:
            message = f"this worker is in route {self._generation}, which is newer than {setup.generation}"
            anchor.send(encode_span_message(SpanRefusal(generation=setup.generation, message=message)))
            return
        self._generation = setup.generation
        self._leave("its worker is in a newer route")
        try:
            built = self._built(setup.span)
            following = None
            if setup.following:
                following = self._neighbours.connect(WorkerId(setup.following), purpose_of_hop(setup.generation))
            self.route = self._route(setup, anchor, following, built)
        except (FleetError, *FAILURES) as error:
            failure = failure_of(f"span {setup.span} cannot be hosted", error)
            log.warning("%s", failure.message)
            anchor.send(encode_span_message(SpanRefusal(generation=setup.generation, message=failure.message)))
            return
        log.info("route %d: this worker has layers %s", setup.generation, setup.span)
        anchor.send(encode_span_message(SpanReady(generation=setup.generation, num_bytes=built.num_bytes)))

    def _built(self, span: str) -> BuiltSpan:
        if self._loaded is None or self._loaded[0] != span:
            self._loaded = None  # its memory is free before the other one is loaded
            self._when_loading()
            self._loaded = span, self._load(LayerSpan.parse(span, "span"))
        return self._loaded[1]

    def _route(self, setup: SpanSetup, anchor: SpanConnection, following: SpanConnection | None, built: BuiltSpan) -> HostedRoute:
        pool = KVPool(
            built.layers.kv_shape, num_pages=setup.num_pages, page_size=setup.page_size, dtype=self._where.dtype,
            device=self._where.device,
        )  # fmt: skip
        returned = None if following is not None else setup.returned
        host = SpanHost(built.layers, pool, tiled=self._where.tiled, returned=returned)
        return HostedRoute(setup=setup, anchor=anchor, following=following, host=host)

    def _leave(self, why: str) -> None:
        """Leave the route; its other members notice by their connections to this worker."""
        route, self.route = self.route, None
        if route is None:
            return
        log.info("route %d ends here: %s", route.setup.generation, why)
        for connection in (route.anchor, route.following):
            if connection is not None:
                connection.close()

    def _compute(self, route: HostedRoute, work: SpanPass, payload: memoryview) -> None:
        """Compute a pass and send it on. One that fails goes on without rows: its changes of the pool are for every worker."""
        began_s = time.monotonic()
        route.host.apply_changes(work)
        if not work.extents:
            self._send_on(route, work)
            return
        try:
            num_rows = sum(extent.stop - extent.start for extent in work.extents)
            done = route.host.run(work, rows_from_wire(payload, num_rows, route.setup.wire_dtype, self._like))
        except FAILURES as error:
            self._report_failure(route, work, error)
            self._send_on(route, msgspec.structs.replace(work, extents=()))
            return
        spent = HopTime(waited_us=0, computed_us=int(1e6 * (time.monotonic() - began_s)))
        self._send_results(route, msgspec.structs.replace(work, times=(*work.times, spent)), done)

    def _report_failure(self, route: HostedRoute, work: SpanPass, error: Exception) -> None:
        failure = failure_of("a span worker failed the request", error)
        if not isinstance(error, FleetError):
            log.error("pass %d of route %d failed", work.number, work.generation, exc_info=error)
        message = SpanFailure(
            generation=work.generation, number=work.number, code=failure.code, message=failure.message,
            loses_rows=isinstance(error, SpanPrefixMismatch),
        )  # fmt: skip
        route.anchor.send(encode_span_message(message))

    def _send_on(self, route: HostedRoute, work: SpanPass) -> None:
        if route.following is not None:
            route.following.send(encode_span_message(work))

    def _send_results(self, route: HostedRoute, work: SpanPass, done: HostedRows) -> None:
        dtype = route.setup.wire_dtype
        if done.tapped_NH is not None:
            tapped = SpanTapped(generation=work.generation, number=work.number)
            route.anchor.send(encode_span_message(tapped), rows_to_wire(done.tapped_NH, dtype))
        rows = done.rows
        payload = rows_to_wire(rows, dtype) if rows is not None else memoryview(b"")
        if route.following is not None:
            route.following.send(encode_span_message(work), payload)
            return
        result = SpanResult(
            generation=work.generation, number=work.number, num_rows=0 if rows is None else len(rows), times=work.times
        )
        route.anchor.send(encode_span_message(result), payload)
