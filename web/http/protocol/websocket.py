"""Uvicorn's WebSocket protocol with limits: unfit handshakes, unfinished messages, clients that do
not read. Knows no event.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from web.http.protocol import refusal
from web.http.protocol.bounds import (
    LINGER_S,
    MAX_DISCARDED_BYTES,
    MAX_DROPPED_BODY_BYTES,
    SMALL_MESSAGE_BYTES,
)
from web.http.protocol.config import BoundedConfig
from web.http.protocol.connection import Connection, SendProgress
from web.http.protocol.message import BodyPace


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket on a connection that `BoundedHttp` accepted and counted."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, BoundedConfig), "BoundedWebSocket needs a BoundedConfig"
        self._table = config.table
        self._slot: Connection
        self._sending = SendProgress()
        self._fragments = bytearray()
        self._held = 0
        """Bytes of an unfinished message; included in the table's `num_unfinished`."""
        self._most_held = 0
        """Maximum of `_held` since the message began. Only the growth of this maximum counts
        towards the rate of the message, so that control frames do not count as progress.
        """
        self._pace = BodyPace()
        self._num_discarded = 0
        self._ends_at: float | None = None

    def take_over(self, slot: Connection) -> None:
        """Serve the connection `slot` from now on, after its upgrade from HTTP."""
        self._slot = slot
        slot.handler = self
        self._table.set_busy(slot)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self._slot)
        super().connection_lost(exc)
        self._drop_unfinished()

    def data_received(self, data: bytes) -> None:
        if self.close_sent:
            self._num_discarded += len(data)
            if self._num_discarded > (
                MAX_DROPPED_BODY_BYTES if self.disconnected else MAX_DISCARDED_BYTES
            ):
                self._slot.raw.abort()
                return
        super().data_received(data)
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            self._refuse_handshake()
        grown = self._count_unfinished() > 0
        full = self._table.num_unfinished > self._table.max_unfinished_bytes
        if full and grown and self._held > SMALL_MESSAGE_BYTES:
            self._end(
                CloseCode.TRY_AGAIN_LATER,
                "WebSocket messages beyond the memory for them",
                "unfinished messages take all their memory (web.body_memory_mib); try again",
            )

    def _count_unfinished(self) -> int:
        """Count the bytes of an unfinished message, in complete frames and in the frame being
        received; return the growth since the last call.
        """
        held = len(self._fragments) + sum(map(len, self.frames)) + len(self.conn.reader.buffer)
        if held and not self._held:
            self._begin_message()
        if held > self._most_held:
            self._pace.num_bytes += held - self._most_held
            self._most_held = held
        grown = held - self._held
        self._table.num_unfinished += grown
        self._held = held
        return grown

    def _begin_message(self) -> None:
        self._most_held = 0
        self._pace.begin(self.loop.time())

    def _drop_unfinished(self) -> None:
        self.frames = []
        self._fragments = bytearray()
        self.conn.reader.discard()
        self._count_unfinished()

    def _end(self, code: CloseCode, kind: str, reason: str) -> None:
        """Close the WebSocket with a close code and reason, and drop its unfinished message. `kind`
        names the cause in the log.
        """
        self._table.note(self._slot, kind, f"a WebSocket was closed: {reason}")
        if self.conn.state is State.OPEN and not self.close_sent:
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.close_sent = self.disconnected = True
            self._linger()
        else:
            self._slot.raw.abort()
        self._drop_unfinished()

    def _linger(self) -> None:
        """Drop input for `LINGER_S`: closing with unread input would reset the connection before
        the close frame is read.
        """
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _refuse_handshake(self) -> None:
        """Refuse an upgrade request that the library could not parse: the library raises no event
        for it, so uvicorn would wait forever.
        """
        found = refusal.BAD_HANDSHAKE
        self._table.note(self._slot, found.kind, f"{found.message} ({self.conn.handshake_exc})")
        self.close_sent = True
        self.transport.write(
            b"".join(self.conn.data_to_send()) or found.response(self.default_headers)
        )
        self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Append a fragment to the unfinished message on arrival: uvicorn's list of many small or
        empty fragments would take more memory than `ws_max_size`.
        """
        if not self._fragments:
            self._fragments += b"".join(self.frames)
            self.frames = []
        self._fragments += event.data
        if event.fin:
            self.frames = [bytes(self._fragments)]
            self._fragments.clear()
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Pass a complete message to the app, as uvicorn does. Text that is not UTF-8 is counted in
        the abuse log, instead of being logged with a stack trace.
        """
        data, self.frames = b"".join(self.frames), []
        self._begin_message()
        if self.close_sent:
            return
        try:
            if self.curr_msg_data_type == "text":
                self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
            else:
                self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
        except UnicodeDecodeError:
            self._table.note(
                self._slot, "WebSocket texts that are not UTF-8", "a text is not UTF-8"
            )
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            # pongs to a peer that does not read would fill the write buffer
            self.conn.data_to_send()

    def resume_writing(self) -> None:
        self._sending.reset()
        super().resume_writing()

    def close_if_overdue(self, now: float) -> None:
        """Close the WebSocket if a time-out has passed; see `ConnectionHandler`."""
        if self._ends_at is not None and now >= self._ends_at:
            self._slot.raw.abort()
            return
        closing = self.transport.is_closing()
        if not closing and self._is_message_too_slow(now):
            reason = (
                "a message came too slowly, or not at all, for "
                f"{self._table.web.body_timeout_s:g} s (web.body_timeout_s)"
            )
            self._end(
                CloseCode.POLICY_VIOLATION,
                "WebSocket messages that were not finished in time",
                reason,
            )
            return
        if self.writable.is_set() and not closing:
            self._sending.reset()
            return
        buffered, timeout_s = self._slot.num_unacknowledged(), self._table.web.send_timeout_s
        if self._sending.is_stalled(buffered, now, timeout_s):
            message = (
                f"the client of a WebSocket read too little for {timeout_s:g} s "
                "(web.send_timeout_s); it is disconnected"
            )
            self._table.note(self._slot, "WebSockets whose client does not read", message)
            self._slot.raw.abort()
        elif closing and not buffered and self._ends_at is None:
            self._ends_at = now + LINGER_S

    def _is_message_too_slow(self, now: float) -> bool:
        if not self._held or self.read_paused:
            self._pace.begin(now)
            return False
        return self._pace.is_too_slow(now, self._table.web.body_timeout_s)
