"""Uvicorn's HTTP protocol with limits: size and time of a request's head, rate of its body, rate at
which its client reads.

Memory: one connection holds its head (`MAX_HEAD_BYTES`), as much again of pipelined requests, and a
few reads of its socket; uvicorn stops reading while 64 KiB of a body wait for the application.
Knows no route.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable
from typing import Any, cast

import httptools
import websockets.http11
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from web.http.disconnect import set_stalled
from web.http.middleware import request_id_or_none
from web.http.protocol import refusal
from web.http.protocol.bounds import (
    LINGER_S,
    MAX_DISCARDED_BYTES,
    MAX_DROPPED_BODY_BYTES,
    MAX_DROPPED_DECLARED_BYTES,
    MAX_PIPELINED,
)
from web.http.protocol.config import BoundedConfig
from web.http.protocol.connection import Connection, SendProgress
from web.http.protocol.handshake import begin_tls
from web.http.protocol.head import RequestHead
from web.http.protocol.http_1_0 import HTTP_1_0, WithoutChunks
from web.http.protocol.message import BodyPace, MessageSize
from web.http.protocol.refusal import ConnectionRefusal
from web.http.protocol.websocket import BoundedWebSocket


class _Refused(Exception):
    """Raised in a callback of the parser to stop it, after the request was refused."""


class PipelineFlow(FlowControl):
    """Uvicorn's flow control, but the socket is not read while pipelined requests wait for an
    answer.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        pipeline: deque[tuple[RequestResponseCycle, ASGI3Application]],
    ) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """Protocol of one connection, from the accepted socket to its end or its upgrade to a
    WebSocket.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, BoundedConfig), "BoundedHttp needs a BoundedConfig"
        self.ws_protocol_class = self._open_websocket  # pyright: ignore[reportAttributeAccessIssue]
        self._tls = config.tls
        self._table = config.table
        self._web = config.table.web
        self._slot: Connection
        self._size = MessageSize()
        self._pace = BodyPace()
        self._sending = SendProgress()
        self._running: RequestResponseCycle | None = None
        self._refusal: ConnectionRefusal | None = None
        self._num_discarded = 0
        self._in_head = True
        self._head_since: float | None = None
        self._ends_at: float | None = None
        """Time at which the connection is aborted. Set after a refusal, and when a closing
        connection has nothing left to write.
        """
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        """Input that arrived together with the end of the TLS handshake."""

    # the connection

    def connection_made(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, transport: asyncio.Transport
    ) -> None:
        self._slot = Connection(transport, get_remote_addr(transport), self)
        self.transport = transport
        self._head_since = self.loop.time()
        if not self._table.add(self._slot):
            self._refuse_connection()
        elif self._tls is None:
            self._begin(transport)
        else:
            self.connections.add(self)
            handshake = begin_tls(self.loop, transport, self, self._tls, self._web.header_timeout_s)
            self._handshake = self.loop.create_task(self._secure(transport, handshake))

    async def _secure(
        self, transport: asyncio.Transport, handshake: Awaitable[asyncio.Transport | None]
    ) -> None:
        try:
            secured = await handshake
        except OSError as error:
            # otherwise the peer disconnected, or was disconnected
            if isinstance(error, ssl.SSLError):
                self._table.note(
                    self._slot, "TLS handshakes that failed", f"the TLS handshake failed: {error}"
                )
            secured = None
        if secured is None or secured.is_closing() or not self.parser:
            transport.abort()
            self._forget()
            return
        self._begin(secured)
        for data in self._early:
            self.data_received(data)
        self._early.clear()

    def _begin(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.pipeline.clear()
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            # uvicorn notifies only the request that was parsed last
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._handshake is not None and not self.flow:
            self._slot.raw.abort()
        else:
            super().shutdown()

    def _forget(self) -> None:
        self._table.remove(self._slot)
        self.connections.discard(self)

    def _refuse_connection(self) -> None:
        """Refuse a new connection: the limit is reached, and no other connection is idle."""
        self._table.note(self._slot, refusal.FULL.kind, refusal.FULL.message)
        self._refusal = refusal.FULL
        if self._tls is None:
            self.transport.write(refusal.FULL.response(self.server_state.default_headers))
            self.transport.close()
        else:
            self.transport.abort()

    # input

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or not self.parser:
            self._discard(len(data))
            return
        if not self.flow:
            self._early.append(data)
            return
        self._unset_keepalive_if_required()
        if self._in_head and self._head_since is None:
            self._head_since = self.loop.time()
        self._size.begin_read(len(data), in_head=self._in_head)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or refusal.MALFORMED)
        else:
            found = self._size.end_read(in_head=self._in_head)
            if found is not None:
                self._refuse(found)
            elif (
                self._size.num_discarded > MAX_DROPPED_BODY_BYTES
                and self._size.num_discarded > self._droppable_bytes()
            ):
                self._slot.raw.abort()

    def _parse(self, data: bytes) -> None:
        """Parse input. An unserved upgrade (to another protocol than WebSocket) is ignored, as RFC
        9110 section 7.8 allows: since the parser would skip the body after it, such a head is
        parsed again without the Upgrade field.
        """
        rest = self._up_to_upgrade(data)
        while rest is not None:
            head = self._head().without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head)
            rest = self._up_to_upgrade(rest) if rest else None

    def _up_to_upgrade(self, data: bytes | memoryview) -> memoryview | None:
        """Parse input. Return the rest after a head with an unserved upgrade; None if all input was
        parsed.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._should_upgrade():
                return memoryview(data)[upgrade.args[0] :]
            self._upgrade()
        return None

    def _head(self) -> RequestHead:
        return RequestHead(
            self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers
        )

    def _droppable_bytes(self) -> int:
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        return MAX_DROPPED_BODY_BYTES if chunked else MAX_DROPPED_DECLARED_BYTES

    def _discard(self, num_bytes: int) -> None:
        """Drop input after a refusal. The connection is aborted beyond `MAX_DROPPED_BODY_BYTES` of
        a body, or `MAX_DISCARDED_BYTES` of a head or while another answer is being sent.
        """
        self._num_discarded += num_bytes
        bound = (
            MAX_DISCARDED_BYTES
            if self._in_head or self._ends_at is None
            else MAX_DROPPED_BODY_BYTES
        )
        if self._num_discarded > bound:
            self._slot.raw.abort()

    def _stop(self, found: ConnectionRefusal) -> None:
        self._refusal = found
        raise _Refused

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._size.begin_message()
        if self._head_since is None:
            self._head_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        if found := self._size.add_url(len(url)):
            self._stop(found)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if found := self._size.add_field(len(name) + len(value)):
            self._stop(found)
        # trailer fields must not become header fields of a request that passed the access rules
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(refusal.PIPELINED)
        head = self._head()
        if found := head.find_fault():
            self._stop(found)
        if self._is_upgrade_ignored():
            return
        head.use_origin_form()
        self.url = head.target
        self.expect_100_continue = self.expect_100_continue and head.version != HTTP_1_0
        # raises for an invalid target: then the head is refused, and counts as unfinished
        super().on_headers_complete()
        self._in_head, self._head_since = False, None
        self._size.set_complete()
        self._table.set_busy(self._slot)
        self._pace.begin(self.loop.time())

    def on_chunk_header(self) -> None:
        """Count a chunk of the body. Called by the parser before the content of each chunk."""
        self._size.num_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._pace.num_bytes += len(body)
        answered = bool(self.cycle and self.cycle.response_complete)
        self._size.add_body(len(body), discarded=answered)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade_ignored():
            return  # `_parse` begins this message again
        super().on_message_complete()
        self._in_head, self._head_since = True, None
        self._size.set_complete()
        if not (
            self._slot.busy or self.transport.is_closing()
        ):  # answered before the end of its body, which stopped uvicorn's timer
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def resume_writing(self) -> None:
        self._sending.reset()
        super().resume_writing()

    # requests

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        is_old = cycle.scope["http_version"] == HTTP_1_0
        super()._start_asgi_task(cycle, WithoutChunks(app, cycle) if is_old else app)

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last:
            self._table.set_idle(self._slot)
        now = self.loop.time()
        self._pace.begin(now)
        if self._head_since is not None:
            self._head_since = now

    def _should_upgrade(self) -> bool:
        return self._head().wants_websocket()

    def _is_upgrade_ignored(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _upgrade(self) -> None:
        if self._running is not None and not self._running.response_complete:
            self._refuse(refusal.UPGRADE_TOO_SOON)
        elif (found := _unfit_for_websocket(self.url, self.headers)) is not None:
            self._refuse(found)
        else:
            self._head().choose_websocket()
            self.handle_websocket_upgrade()

    def _open_websocket(self, **arguments: Any) -> BoundedWebSocket:
        websocket = BoundedWebSocket(**arguments)
        websocket.take_over(self._slot)
        return websocket

    # time

    def close_if_overdue(self, now: float) -> None:
        """Close the connection, or refuse its request, if a time-out has passed; see
        `ConnectionHandler`.
        """
        if self._ends_at is not None and now >= self._ends_at:
            self._slot.raw.abort()
        elif not self.flow:
            self._check_handshake(now)
        elif not self._check_sending(now):
            self._check_receiving(now)

    def _check_handshake(self, now: float) -> None:
        if self._head_since is not None and now - self._head_since > self._web.header_timeout_s:
            self._table.note(
                self._slot,
                "TLS handshakes that took too long",
                "the TLS handshake did not end in time (web.header_timeout_s)",
            )
            self._slot.raw.abort()

    def _check_sending(self, now: float) -> bool:
        """Abort the connection if its client reads too slowly. Return True if it was aborted, is
        closing or still has bytes to send, so that no time-out of receiving applies.
        """
        closing = self.transport.is_closing()
        if not (closing or self.flow.write_paused or not self._slot.busy):
            self._sending.reset()
            return False
        buffered = self._slot.num_unacknowledged()
        if self._sending.is_stalled(buffered, now, self._web.send_timeout_s):
            self._abort_stalled()
            return True
        if closing and not buffered and self._ends_at is None:
            self._ends_at = now + LINGER_S
        return closing or buffered > 0

    def _abort_stalled(self) -> None:
        request = ""
        if self._running is not None and not self._running.response_complete:
            scope = cast(Scope, self._running.scope)
            set_stalled(scope)
            request = f"request {request_id_or_none(scope)}: "
        message = (
            f"{request}the client read too little of its answer for "
            f"{self._web.send_timeout_s:g} s (web.send_timeout_s)"
        )
        self._table.note(
            self._slot,
            "connections whose client does not read",
            f"{message}; the connection is closed",
        )
        self._slot.raw.abort()

    def _check_receiving(self, now: float) -> None:
        if self._refusal is not None:
            return
        if self._in_head:
            if self._slot.busy or self._head_since is None:
                return
            if now - self._head_since > self._web.header_timeout_s:
                # browsers open connections in advance: a silent one is not logged
                self._refuse(
                    refusal.slow_head(self._web.header_timeout_s),
                    logged=self._size.num_head_bytes > 0,
                )
            return
        answering = self.cycle.response_started and not self.cycle.response_complete
        is_held_back = (
            self.flow.read_paused
            or self.cycle.waiting_for_100_continue
            or self.cycle is not self._running
        )
        if answering or is_held_back:
            self._pace.begin(now)
        elif self._pace.is_too_slow(now, self._web.body_timeout_s):
            self._refuse(refusal.slow_body(self._web.body_timeout_s))

    # refusal and end

    def _refuse(self, found: ConnectionRefusal, *, logged: bool = True) -> None:
        """Send a refusal and end the connection. If another answer is being sent, complete it
        instead of sending the refusal.
        """
        self._refusal = found
        if logged:
            self._table.note(self._slot, found.kind, found.message)
        self.pipeline.clear()
        running = (
            self._running
            if self._running is not None and not self._running.response_complete
            else None
        )
        if running is not None and (
            self._in_head or running is not self.cycle or running.response_started
        ):
            running.keep_alive = False  # its answer is completed, then the connection closes
            self.flow.resume_reading()  # to notice a disconnect
            return
        if running is not None:
            running.disconnected = True
            running.message_event.set()
        # not while the rest of an answered request is dropped
        if running is not None or self._in_head:
            self.transport.write(found.response(self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """Close the sending direction, and drop input for `LINGER_S`."""
        self._refusal = self._refusal or refusal.MALFORMED
        self._ends_at = self.loop.time() + LINGER_S
        self._table.set_idle(self._slot)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


def _unfit_for_websocket(
    url: bytes, headers: list[tuple[bytes, bytes]]
) -> ConnectionRefusal | None:
    """Return the refusal of an upgrade request that exceeds the WebSocket library's own limits, or
    None. The library parses the head again, and uvicorn would send no response to a request that
    the library refuses.
    """
    max_line = websockets.http11.MAX_LINE_LENGTH
    if len(b"GET  HTTP/1.1\r\n") + len(url) > max_line:
        return refusal.LONG_WEBSOCKET_URL
    if len(headers) > websockets.http11.MAX_NUM_HEADERS:
        return refusal.MANY_FIELDS
    if any(len(name) + len(value) + len(b": \r\n") > max_line for name, value in headers):
        return refusal.LARGE_WEBSOCKET_HEAD
    return None
