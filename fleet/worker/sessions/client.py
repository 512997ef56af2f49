"""Client of the workers' session services, which save and load cached conversations, and the file
of a saved session.
"""

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import redis
from redis.exceptions import RedisError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.connect import exchange, pairs, text
from fleet.control.outage import cause_of
from fleet.core.errors import (
    BadInput,
    NotFound,
    NoWorker,
    RedisUnreachable,
    SessionInterrupted,
    from_code,
)
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
from fleet.core.session_parts import check_parts
from fleet.process.fleet_secret import FleetSecret
from fleet.spans.net.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.worker.process.endpoints import endpoint_of

TIMEOUT_S = 60.0
DIAL_TIMEOUT_S = 5.0
INFO, DIGEST = "fleet_session", "fleet_session_sha256"
"""Metadata keys of a session file: description, and digest of the description and all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """A saved session: description, and parts by name, as bytes.

    On disk the file has a digest of both, so that a changed byte is noticed before a worker caches
    it.
    """

    info: SessionInfo
    parts: dict[str, memoryview]

    def write(self, file: Path) -> None:
        """Write the session as a safetensors file: each part as uint8, the description as metadata.
        An existing file is replaced only by a complete one.

        Raises: BadInput, OSError; an existing file is then unchanged.
        """
        arrays = {name: np.frombuffer(part, np.uint8) for name, part in self.parts.items()}
        spare = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            save_file(
                arrays,
                spare,
                metadata={INFO: msgspec.json.encode(self.info).decode(), DIGEST: self._digest()},
            )
            with spare.open("rb+") as written:
                os.fsync(written.fileno())
            spare.replace(file)
        except SafetensorError as error:
            raise BadInput(f"{file}: cannot be written: {error}", param="FILE") from error
        finally:
            spare.unlink(missing_ok=True)

    @classmethod
    def read(cls, file: Path) -> "SessionFile":
        """Read and check a session file. Raises: BadInput if the file is no session file, or is
        damaged.
        """
        try:
            with safe_open(file, framework="numpy") as opened:
                metadata = cast("dict[str, str]", opened.metadata() or {})
                info = msgspec.json.decode(metadata.get(INFO, ""), type=SessionInfo)
                # Not `get_tensor`, which cannot read every dtype that a damaged header may name.
                check_parts(
                    info, {name: _num_bytes(opened.get_slice(name)) for name in opened.keys()}
                )
                parts = {
                    name: memoryview(opened.get_tensor(name).tobytes()) for name in opened.keys()
                }
            found = cls(info=info, parts=parts)
            if metadata.get(DIGEST) != found._digest():
                raise BadInput("its bytes do not match their digest; save the session again")
        except (
            OSError,
            SafetensorError,
            msgspec.DecodeError,
            UnicodeDecodeError,
            BadInput,
        ) as error:
            raise BadInput(
                f"{file}: is not the file of a session: {error}", param="FILE"
            ) from error
        return found

    def _digest(self) -> str:
        digest = hashlib.sha256(msgspec.json.encode(self.info))
        for name, part in sorted(self.parts.items()):
            digest.update(f"{name} {part.nbytes} ".encode())
            digest.update(part)
        return digest.hexdigest()


def _num_bytes(tensor: Any) -> int:
    """Return the size of a part in a session file. Raises: BadInput if the part is not a
    one-dimensional array of bytes.
    """
    shape, dtype = tensor.get_shape(), tensor.get_dtype()
    if dtype != "U8" or len(shape) != 1:
        raise BadInput(f"a part of it has the shape {shape} of {dtype}, not one row of bytes")
    return int(shape[0])


@contextmanager
def named_outages() -> Iterator[None]:
    """Run a `with` block, turning errors of Redis into RedisUnreachable."""
    try:
        yield
    except RedisError as error:
        raise RedisUnreachable(cause_of(error)) from error


class SessionClient:
    """Client that finds the worker of a session, and saves the session from it or loads a saved
    one. All methods also raise RedisUnreachable.
    """

    def __init__(
        self, client: redis.Redis, config: FleetConfig, secret: FleetSecret | None
    ) -> None:
        self._client = client
        self._config = config
        self._secret = secret

    def save(self, stage: StageName, session: str, name: str) -> SessionFile:
        """Return a cached session, copied from its worker. `name`: the conversation's name in
        errors. Raises: NotFound if no worker caches the session; SessionInterrupted if the copy is
        lost or damaged; the error that the worker reports.
        """
        return self.save_from(self.worker_of(stage, session, name), session)

    def worker_of(self, stage: StageName, session: str, name: str) -> WorkerId:
        """Return the worker that caches a session. `name`: the conversation's name in errors.
        Raises: NotFound if no worker caches it.
        """
        with named_outages():
            worker = text(
                cast("bytes | None", self._client.hget(keys.cached_prefix(session), stage))
            )
        if not worker:
            kept = f"{self._config.lease.prefix_cache_s:g} s (lease.prefix_cache_s)"
            raise NotFound(
                f"no worker of {stage} caches a conversation {name!r}; it is kept for {kept} "
                "after a turn"
            )
        return WorkerId(worker)

    def save_from(self, worker: WorkerId, session: str) -> SessionFile:
        """Return a session cached by `worker`. Raises: NotFound if the worker has left;
        SessionInterrupted if the copy is lost or damaged; the error that the worker reports.
        """
        connection, arrivals = self._connect(worker)
        connection.send(encode_session_message(SaveSession(session=session)))
        try:
            received = _received(arrivals)
        finally:
            connection.close()
        try:
            return _session_of(received)
        except BadInput as error:
            raise SessionInterrupted(
                f"worker {worker} sent a damaged session: {error}; try again"
            ) from error

    def load(self, stage: StageName, session: str, file: SessionFile) -> None:
        """Load a saved session into the cache of the stage's worker with the fewest tasks. Raises:
        NoWorker if no worker of the stage accepts tasks; SessionInterrupted if the connection is
        lost; the error that the worker reports.
        """
        connection, arrivals = self._connect(self._choose(stage))
        connection.send(encode_session_message(LoadSession(session=session, info=file.info)))
        for name, part in file.parts.items():
            connection.send(encode_session_message(SessionPart(session=session, name=name)), part)
        connection.send(encode_session_message(SessionEnd(session=session)))
        try:
            _received(arrivals)
        finally:
            connection.close()

    def _choose(self, stage: StageName) -> WorkerId:
        with named_outages():
            (found,) = exchange(
                self._client, (), ("ZRANGE", keys.role_workers(RoleName(stage), "accepting"), 0, -1)
            )
            workers = [WorkerId(text(name)) for name in cast("list[bytes]", found)]
            if not workers:
                raise NoWorker(f"no worker of {stage} is running")
            return min(workers, key=lambda worker: self._client.scard(keys.worker_tasks(worker)))

    def _connect(self, worker: WorkerId) -> tuple[SpanConnection, SpanArrivals]:
        with named_outages():
            fields = pairs(self._client.hgetall(keys.worker(worker)))
        endpoint = endpoint_of("session", fields, self._secret)
        if endpoint is None:
            raise NotFound(f"worker {worker} has left, or its engine does not save sessions")
        if self._secret is not None and not self._secret.verifies(worker, fields):
            raise BadInput(
                f"the record of worker {worker} in Redis is not signed with security.fleet_secret"
            )
        arrivals = SpanArrivals()
        own_name = f"session@{uuid.uuid4().hex[:8]}"
        connection = dial(
            endpoint.address,
            key=endpoint.key,
            own_name=own_name,
            purpose=PURPOSE,
            arrivals=arrivals,
            timeout_s=DIAL_TIMEOUT_S,
        )
        return connection, arrivals


def _session_of(received: "list[tuple[AnySessionMessage, memoryview]]") -> SessionFile:
    """Return the session in a worker's messages. Raises: BadInput if the session is incomplete."""
    info: SessionInfo | None = None
    parts: dict[str, memoryview] = {}
    for message, payload in received:
        if isinstance(message, SessionHead):
            info = message.info
        elif isinstance(message, SessionPart):
            parts[message.name] = payload
    if info is None:
        raise BadInput("it has no description")
    check_parts(info, {name: part.nbytes for name, part in parts.items()})
    return SessionFile(info=info, parts=parts)


def _received(arrivals: SpanArrivals) -> "list[tuple[AnySessionMessage, memoryview]]":
    """Return all messages of a worker's reply except for the last, which only marks the end.
    Raises: the error that the worker reports; SessionInterrupted if the connection is lost or the
    worker is silent.
    """
    received: list[tuple[AnySessionMessage, memoryview]] = []
    while arrived := arrivals.take(TIMEOUT_S):
        for arrival in arrived:
            if isinstance(arrival, ConnectionClosed):
                raise SessionInterrupted(f"the worker is gone: {arrival.reason}; try again")
            if isinstance(arrival, FrameReceived):
                received.append(
                    (decode_session_message(arrival.frame.header), arrival.frame.payload)
                )
        last = received[-1][0] if received else None
        if isinstance(last, SessionEnd) and last.error:
            raise from_code(last.code, last.error)
        if isinstance(last, SessionEnd):
            return received[:-1]
    raise SessionInterrupted(f"the worker did not answer within {TIMEOUT_S:g} s; try again")
