"""Service of a worker to `fleet session`: cached conversations out and in, over connections of their own.

Called from the worker's loop; nothing here waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, FleetError
from fleet.core.fleet_secret import FleetSecret, span_connection_key
from fleet.core.ids import StageName, WorkerId
from fleet.core.session_messages import (
    LoadSession,
    SaveSession,
    SessionEnd,
    SessionHead,
    SessionInfo,
    SessionPart,
    decode_session_message,
    encode_session_message,
    missing_parts,
)
from fleet.engine.base import Engine, SavedSession, SessionCopied
from fleet.spans.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.listener import SpanListener
from fleet.worker.endpoints import endpoint_fields, new_token


@dataclass(slots=True, kw_only=True)
class IncomingSession:
    """A session that is being received. `parts`: by name."""

    info: SessionInfo
    parts: dict[str, memoryview] = field(default_factory=dict[str, memoryview])

    def saved(self) -> SavedSession:
        """Raises: BadInput if a part is missing."""
        if missing := missing_parts(self.info, self.parts):
            raise BadInput(f"the file lacks {', '.join(missing[:3])}; save the session again")
        positions = np.frombuffer(self.parts.get("positions", b""), np.int32).tolist()
        tapped = np.frombuffer(self.parts.get("tapped", b""), np.float32).reshape(max(1, len(positions)), -1)
        return SavedSession(
            num_rows=self.info.num_rows,
            keys=np.frombuffer(self.parts["keys"], np.int64),
            layers=[np.frombuffer(self.parts[str(layer)], np.uint8) for layer in range(self.info.num_layers)],
            layout=self.info.layout,
            tapped=dict(zip(positions, tapped, strict=True)) if positions else {},
        )


class SessionService:
    """`on_loaded` is called with the name of a session that is cached from then on."""

    def __init__(
        self, engine: Engine, stage: StageName, checkpoint: str, host: str, worker: WorkerId, secret: FleetSecret | None,
        on_loaded: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._engine, self._stage, self._checkpoint, self._on_loaded = engine, stage, checkpoint, on_loaded
        self._token = new_token()
        self._arrivals = SpanArrivals()
        key = span_connection_key(secret, self._token)
        self._listener = SpanListener(host, arrivals=self._arrivals, key=key, own_name=worker)
        self._incoming: dict[SpanConnection, IncomingSession] = {}
        self._waiting: dict[str, list[SpanConnection]] = {}

    @property
    def fields(self) -> dict[str, str | bytes]:
        """The part of the worker's record by which `fleet session` connects."""
        return endpoint_fields("session", self._listener.address, self._token)

    def close(self) -> None:
        """Close the listener and every connection; a client notices, and tries again."""
        self._listener.close()
        self._arrivals.close_connections()

    def advance(self) -> None:
        """Handle what has arrived, and answer what the engine has copied."""
        for arrival in self._arrivals.take(0):
            if isinstance(arrival, FrameReceived):
                self._receive(arrival)
            elif isinstance(arrival, ConnectionClosed):
                self._incoming.pop(arrival.connection, None)
        for copied in self._engine.take_copied():
            self._answer(copied)

    def _receive(self, arrival: FrameReceived) -> None:
        connection, message = arrival.connection, decode_session_message(arrival.frame.header)
        try:
            match message:
                case SaveSession(session=session):
                    self._engine.begin_save(session)
                    self._waiting.setdefault(session, []).append(connection)
                case LoadSession(info=info):
                    self._check(info)
                    self._incoming[connection] = IncomingSession(info=info)
                case SessionPart(name=name) if connection in self._incoming:
                    self._incoming[connection].parts[name] = arrival.frame.payload
                case SessionEnd(session=session) if connection in self._incoming:
                    self._engine.begin_load(session, self._incoming.pop(connection).saved())
                    self._waiting.setdefault(session, []).append(connection)
                case _:
                    return
        except FleetError as error:
            self._incoming.pop(connection, None)
            connection.send(encode_session_message(SessionEnd(session=message.session, error=error.message, code=error.code)))

    def _check(self, info: SessionInfo) -> None:
        """Raises: BadInput if the session is of another stage or checkpoint."""
        for name, given, own in (("stage", info.stage, self._stage), ("checkpoint", info.checkpoint, self._checkpoint)):
            if given != own:
                raise BadInput(f"the file is of {name} {given}, and this worker's is {own}")

    def _answer(self, copied: SessionCopied) -> None:
        waiting = self._waiting.pop(copied.session, [])
        if copied.error is None and copied.saved is None:
            self._on_loaded(copied.session)
        for connection in waiting:
            if copied.saved is not None:
                self._send(connection, copied.session, copied.saved)
            error, code = (copied.error.message, copied.error.code) if copied.error is not None else ("", "")
            connection.send(encode_session_message(SessionEnd(session=copied.session, error=error, code=code)))

    def _send(self, connection: SpanConnection, session: str, saved: SavedSession) -> None:
        info = SessionInfo(
            num_rows=saved.num_rows, num_layers=len(saved.layers), layout=saved.layout, checkpoint=self._checkpoint,
            stage=self._stage,
        )  # fmt: skip
        connection.send(encode_session_message(SessionHead(session=session, info=info)))
        for name, part in parts_of(saved).items():
            connection.send(encode_session_message(SessionPart(session=session, name=name)), part.data)


def parts_of(saved: SavedSession) -> dict[str, NDArray[np.generic]]:
    """Return the parts of a session by name, C-contiguous."""
    parts: dict[str, NDArray[np.generic]] = {str(layer): rows for layer, rows in enumerate(saved.layers)}
    parts["keys"] = np.asarray(saved.keys, np.int64)
    if saved.tapped:
        parts["positions"] = np.array(sorted(saved.tapped), np.int32)
        parts["tapped"] = np.stack([saved.tapped[position] for position in sorted(saved.tapped)]).astype(np.float32)
    return {name: np.ascontiguousarray(part) for name, part in parts.items()}
