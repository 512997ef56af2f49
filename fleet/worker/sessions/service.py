"""A worker's service for `fleet session`: sends cached conversations and receives saved ones, over
connections of their own.

Called from the worker's loop, so no method waits. What arrives is checked against the engine's
limits before it is kept; a connection with an unexpected message is closed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, FleetError, SessionInterrupted, UnknownWireVersion
from fleet.core.ids import StageName, WorkerId
from fleet.core.session_messages import (
    PURPOSE,
    AnySessionMessage,
    LoadSession,
    SaveSession,
    SessionEnd,
    SessionHead,
    SessionInfo,
    SessionPart,
    decode_session_message,
    encode_session_message,
)
from fleet.core.session_parts import (
    KEYS,
    POSITIONS,
    TAPPED,
    check_info,
    check_part,
    check_parts,
)
from fleet.engine.capabilities import SavedSession, SessionCopied, SessionCopying
from fleet.process.fleet_secret import FleetSecret, span_connection_key
from fleet.spans.net.connection import (
    Arrival,
    ConnectionClosed,
    ConnectionOpened,
    FrameReceived,
    SpanArrivals,
    SpanConnection,
)
from fleet.spans.net.listener import SpanListener
from fleet.worker.process.endpoints import endpoint_fields, new_token

log = logging.getLogger(__name__)

MAX_LOADS = 4
"""Largest number of sessions that are received at one time; a session may be as large as the KV
pool.
"""
SILENT_S = 300.0
"""Time in which a client must send a whole message, or close an answered connection. A frozen
client would otherwise count against `MAX_LOADS` until it ends.
"""


@dataclass(slots=True, kw_only=True)
class IncomingSession:
    """A session that a client is sending. `info`: description of the session; `parts`: parts
    received up to now, by name.
    """

    info: SessionInfo
    parts: dict[str, memoryview] = field(default_factory=dict[str, memoryview])

    def add(self, name: str, part: memoryview) -> None:
        """Keep a received part. Raises: BadInput if the part is unknown, was received before, or
        does not have the size that the description implies.
        """
        check_part(self.info, name, part.nbytes)
        if name in self.parts:
            raise BadInput(f"the part {name} of the session came twice")
        self.parts[name] = part

    def saved(self) -> SavedSession:
        """Return the complete session, ready for the engine. Raises: BadInput if a part is missing,
        or the parts contradict each other.
        """
        check_parts(self.info, {name: part.nbytes for name, part in self.parts.items()})
        positions = np.frombuffer(self.parts.get(POSITIONS, b""), np.int32).tolist()
        tapped = np.frombuffer(self.parts.get(TAPPED, b""), np.float32).reshape(
            max(1, len(positions)), -1
        )
        return SavedSession(
            num_rows=self.info.num_rows,
            keys=np.frombuffer(self.parts[KEYS], np.int64),
            layers=[
                np.frombuffer(self.parts[str(layer)], np.uint8)
                for layer in range(self.info.num_layers)
            ],
            layout=self.info.layout,
            tapped=dict(zip(positions, tapped, strict=True)) if positions else {},
        )


class SessionService:
    """Listener for `fleet session`, which saves and loads the cached sessions of a worker. A
    connection serves one operation. `on_loaded`: function that is called with the name of a session
    once the engine has cached it.
    """

    def __init__(
        self,
        sessions: SessionCopying,
        stage: StageName,
        checkpoint: str,
        place: str | Path,
        worker: WorkerId,
        secret: FleetSecret | None,
        on_loaded: Callable[[str], None],
    ) -> None:
        """Open the listener. `place`: IP address, or folder of Unix sockets, at which it
        listens.
        """
        self._sessions = sessions
        self._stage = stage
        self._checkpoint = checkpoint
        self._on_loaded = on_loaded
        self._token = new_token()
        self._arrivals = SpanArrivals(max_payload_bytes=sessions.limits.max_part_bytes)
        key = span_connection_key(secret, self._token)
        self._listener = SpanListener(place, arrivals=self._arrivals, key=key, own_name=worker)
        self._idle: set[SpanConnection] = set()
        self._incoming: dict[SpanConnection, IncomingSession] = {}
        self._waiting: dict[str, list[SpanConnection]] = {}
        self._heard_s: dict[SpanConnection, float] = {}
        """Time of the last message on each connection whose client's turn it is."""

    @property
    def fields(self) -> dict[str, str | bytes]:
        """Fields of the worker's record in Redis, address and token, with which `fleet session`
        connects.
        """
        return endpoint_fields("session", self._listener.address, self._token)

    def close(self) -> None:
        """Close the listener and every connection; clients notice, and may try again."""
        self._listener.close()
        self._arrivals.close_connections()

    def advance(self) -> None:
        """Handle messages that have arrived, and answer clients whose copies the engine has
        finished.
        """
        for arrival in self._arrivals.take(0):
            self._handle(arrival)
        for copied in self._sessions.take_copied():
            self._answer(copied)
        self._close_silent(time.monotonic())

    def _close_silent(self, now_s: float) -> None:
        for connection, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > SILENT_S and not connection.backlog_bytes:
                del self._heard_s[connection]
                self._end(connection, f"its client has sent nothing for {SILENT_S:g} s")

    def _handle(self, arrival: Arrival) -> None:
        connection = arrival.connection
        match arrival:
            case ConnectionOpened(purpose=purpose):
                self._idle.add(connection)
                self._heard_s[connection] = time.monotonic()
                if purpose != PURPOSE:
                    self._end(connection, f"its purpose is {purpose[:64]!r}")
            case ConnectionClosed():
                self._idle.discard(connection)
                self._incoming.pop(connection, None)
                self._heard_s.pop(connection, None)
            case FrameReceived(frame=frame):
                self._heard_s[connection] = time.monotonic()
                try:
                    message = decode_session_message(frame.header)
                except UnknownWireVersion as error:
                    self._end(connection, error.message)
                    return
                self._receive(connection, message, frame.payload)

    def _end(self, connection: SpanConnection, cause: str) -> None:
        """Close a connection whose client does not follow the protocol."""
        if not connection.is_closed:
            log.warning("the session connection from %s is closed: %s", connection.peer, cause)
            connection.close()

    def _receive(
        self, connection: SpanConnection, message: AnySessionMessage, payload: memoryview
    ) -> None:
        try:
            match message:
                case SaveSession(session=session) if connection in self._idle:
                    self._idle.discard(connection)
                    self._sessions.begin_save(session)
                    self._await_engine(session, connection)
                case LoadSession(info=info) if connection in self._idle:
                    self._idle.discard(connection)
                    self._check(info)
                    self._incoming[connection] = IncomingSession(info=info)
                case SessionPart(name=name) if connection in self._incoming:
                    self._incoming[connection].add(name, payload)
                case SessionEnd(session=session) if connection in self._incoming:
                    self._sessions.begin_load(session, self._incoming.pop(connection).saved())
                    self._await_engine(session, connection)
                case SessionPart() | SessionEnd() if connection not in self._idle:
                    return  # of a session that was refused
                case _:
                    self._end(connection, f"{type(message).__name__} was not due")
        except FleetError as error:
            self._incoming.pop(connection, None)
            connection.send(
                encode_session_message(
                    SessionEnd(session=message.session, error=error.message, code=error.code)
                )
            )

    def _await_engine(self, session: str, connection: SpanConnection) -> None:
        self._waiting.setdefault(session, []).append(connection)
        self._heard_s.pop(connection, None)

    def _check(self, info: SessionInfo) -> None:
        """Check a session's description before its parts are received. Raises: BadInput if it is of
        another stage or checkpoint, or too large; SessionInterrupted if too many sessions are being
        received.
        """
        for name, given, own in (
            ("stage", info.stage, self._stage),
            ("checkpoint", info.checkpoint, self._checkpoint),
        ):
            if given != own:
                raise BadInput(f"the file is of {name} {given[:64]}, and this worker's is {own}")
        check_info(info)
        self._sessions.limits.check(info.num_rows, info.num_layers, info.layout)
        if len(self._incoming) >= MAX_LOADS:
            raise SessionInterrupted(
                f"{MAX_LOADS} sessions are loaded into this worker at the moment; try again"
            )

    def _answer(self, copied: SessionCopied) -> None:
        waiting = self._waiting.pop(copied.session, [])
        if copied.error is None and copied.saved is None:
            self._on_loaded(copied.session)
        for connection in waiting:
            if not connection.is_closed:
                self._heard_s[connection] = time.monotonic()
            if copied.saved is not None:
                self._send(connection, copied.session, copied.saved)
            error, code = (
                (copied.error.message, copied.error.code) if copied.error is not None else ("", "")
            )
            connection.send(
                encode_session_message(SessionEnd(session=copied.session, error=error, code=code))
            )

    def _send(self, connection: SpanConnection, session: str, saved: SavedSession) -> None:
        info = SessionInfo(
            num_rows=saved.num_rows,
            num_layers=len(saved.layers),
            layout=saved.layout,
            checkpoint=self._checkpoint,
            stage=self._stage,
        )
        connection.send(encode_session_message(SessionHead(session=session, info=info)))
        for name, part in parts_of(saved).items():
            connection.send(
                encode_session_message(SessionPart(session=session, name=name)), part.data
            )


def parts_of(saved: SavedSession) -> dict[str, NDArray[np.generic]]:
    """Return the parts of a saved session as C-contiguous arrays, by name."""
    parts: dict[str, NDArray[np.generic]] = {
        str(layer): rows for layer, rows in enumerate(saved.layers)
    }
    parts[KEYS] = np.asarray(saved.keys, np.int64)
    if saved.tapped:
        parts[POSITIONS] = np.array(sorted(saved.tapped), np.int32)
        parts[TAPPED] = np.stack(
            [saved.tapped[position] for position in sorted(saved.tapped)]
        ).astype(np.float32)
    return {name: np.ascontiguousarray(part) for name, part in parts.items()}
