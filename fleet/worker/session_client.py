"""Client of workers' session services, and the file of a session."""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import redis
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.connect import exchange, pairs, text
from fleet.core.errors import BadInput, FleetError, NotFound, NoWorker
from fleet.core.fleet_secret import FleetSecret
from fleet.core.ids import RoleName, StageName, WorkerId
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
from fleet.spans.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.dial import dial
from fleet.worker.endpoints import endpoint_of

TIMEOUT_S = 60.0
DIAL_TIMEOUT_S = 5.0
INFO = "fleet_session"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """A session's description and its parts by name, as bytes."""

    info: SessionInfo
    parts: dict[str, memoryview]

    def write(self, file: Path) -> None:
        """Write a file of safetensors: each part as uint8, the description as metadata."""
        arrays = {name: np.frombuffer(part, np.uint8) for name, part in self.parts.items()}
        save_file(arrays, file, metadata={INFO: msgspec.json.encode(self.info).decode()})

    @classmethod
    def read(cls, file: Path) -> "SessionFile":
        """Raises: BadInput if it is not the file of a session."""
        try:
            with safe_open(file, framework="numpy") as opened:
                metadata = cast("dict[str, str]", opened.metadata() or {})
                info = msgspec.json.decode(metadata.get(INFO, ""), type=SessionInfo)
                parts = {name: memoryview(opened.get_tensor(name).tobytes()) for name in opened.keys()}
        except (OSError, SafetensorError, msgspec.DecodeError) as error:
            raise BadInput(f"{file}: is not the file of a session: {error}", param="FILE") from error
        return cls(info=info, parts=parts)


class SessionClient:
    """Finds the worker of a session and exchanges its rows with it."""

    def __init__(self, client: redis.Redis, config: FleetConfig, secret: FleetSecret | None) -> None:
        self._client, self._config, self._secret = client, config, secret

    def save(self, stage: StageName, session: str, name: str) -> SessionFile:
        """Raises: NotFound if no worker has the session; the worker's error."""
        worker = text(cast("bytes | None", self._client.hget(keys.cached_prefix(session), stage)))
        if not worker:
            kept = f"{self._config.lease.prefix_cache_s:g} s (lease.prefix_cache_s)"
            raise NotFound(f"no worker of {stage} caches a conversation {name!r}; it is kept for {kept} after a turn")
        connection, arrivals = self._connect(WorkerId(worker))
        connection.send(encode_session_message(SaveSession(session=session)))
        info: SessionInfo | None = None
        parts: dict[str, memoryview] = {}
        for message, payload in _received(arrivals):
            if isinstance(message, SessionHead):
                info = message.info
            elif isinstance(message, SessionPart):
                parts[message.name] = payload
        connection.close()
        assert info is not None, "parts without a head"
        return SessionFile(info=info, parts=parts)

    def load(self, stage: StageName, session: str, file: SessionFile) -> None:
        """Raises: NoWorker; the worker's error."""
        connection, arrivals = self._connect(self._choose(stage))
        connection.send(encode_session_message(LoadSession(session=session, info=file.info)))
        for name, part in file.parts.items():
            connection.send(encode_session_message(SessionPart(session=session, name=name)), part)
        connection.send(encode_session_message(SessionEnd(session=session)))
        for _ in _received(arrivals):
            pass
        connection.close()

    def _choose(self, stage: StageName) -> WorkerId:
        (found,) = exchange(self._client, (), ("ZRANGE", keys.role_workers(RoleName(stage), "accepting"), 0, -1))
        workers = [WorkerId(text(name)) for name in cast("list[bytes]", found)]
        if not workers:
            raise NoWorker(f"no worker of {stage} is running")
        return min(workers, key=lambda worker: self._client.scard(keys.worker_tasks(worker)))

    def _connect(self, worker: WorkerId) -> tuple[SpanConnection, SpanArrivals]:
        fields = pairs(self._client.hgetall(keys.worker(worker)))
        endpoint = endpoint_of("session", fields, self._secret)
        if endpoint is None:
            raise NotFound(f"worker {worker} has left, or its engine does not save sessions")
        if self._secret is not None and not self._secret.verifies(worker, fields):
            raise BadInput(f"the record of worker {worker} in Redis is not signed with security.fleet_secret")
        arrivals = SpanArrivals()
        own_name = f"session@{uuid.uuid4().hex[:8]}"
        connection = dial(
            endpoint.address, key=endpoint.key, own_name=own_name, purpose=PURPOSE, arrivals=arrivals, timeout_s=DIAL_TIMEOUT_S
        )
        return connection, arrivals


def _received(arrivals: SpanArrivals) -> "list[tuple[AnySessionMessage, memoryview]]":
    """Return what a worker sends, to the end. Raises: FleetError with the worker's error, or if it is lost."""
    received: list[tuple[AnySessionMessage, memoryview]] = []
    while arrived := arrivals.take(TIMEOUT_S):
        for arrival in arrived:
            if isinstance(arrival, ConnectionClosed):
                raise FleetError(f"the worker is gone: {arrival.reason}; try again")
            if isinstance(arrival, FrameReceived):
                received.append((decode_session_message(arrival.frame.header), arrival.frame.payload))
        last = received[-1][0] if received else None
        if isinstance(last, SessionEnd) and last.error:
            raise BadInput(last.error)
        if isinstance(last, SessionEnd):
            return received[:-1]
    raise FleetError(f"the worker did not answer within {TIMEOUT_S:g} s")
