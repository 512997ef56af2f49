"""What the gateway needs of the control plane. `fleet.control.client.FleetClient` satisfies it; tests use a fake.

Knows no Redis and no HTTP.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from fleet.core.chunk import Chunk
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec


class WorkerView(Protocol):
    """One live worker, or a gateway (its role is ""). Units: `started_us` since 1970, on Redis's clock."""

    @property
    def id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def started_us(self) -> int: ...
    @property
    def lease_left_s(self) -> float: ...
    @property
    def running(self) -> int: ...
    @property
    def capacity(self) -> int: ...


class TaskView(Protocol):
    @property
    def stage(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def owner(self) -> str | None: ...
    @property
    def walk(self) -> str | None: ...


class EdgeView(Protocol):
    """Units: `produced` and `consumed` count chunks; `items` what they hold (tokens, frames)."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def produced(self) -> int: ...
    @property
    def consumed(self) -> int: ...
    @property
    def items(self) -> int: ...


class RequestView(Protocol):
    """One request's story, from the truth in Redis."""

    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def created_us(self) -> int: ...
    @property
    def tasks(self) -> Sequence[TaskView]: ...
    @property
    def edges(self) -> Sequence[EdgeView]: ...


class ClientStream(Protocol):
    """The client edges of one request: chunks in index order per edge, ending when every requested edge is final.

    Raises: FleetError from `__anext__` when the request failed.
    """

    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def abort(self, reason: str) -> None:
        """Stop the request everywhere. Idempotent; nothing happens to one that has ended."""
        ...


class FleetPort(Protocol):
    """Raises: RedisUnreachable from any method."""

    async def submit(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        """Raises: Overloaded, NoWorker."""
        ...

    async def workers(self) -> Sequence[WorkerView]: ...

    async def missing_roles(self) -> Sequence[str]: ...

    async def request_view(self, request: RequestId) -> RequestView | None: ...

    async def abort_request(self, request: RequestId) -> bool:
        """Whether it was live."""
        ...

    async def keep_transcript(self, audio_id: str, transcript: str, keep_s: int) -> None:
        """What a spoken answer said, for follow-up turns that name it by id."""
        ...

    async def transcript(self, audio_id: str) -> str | None: ...

    async def ping(self) -> bool: ...

    async def live_count(self) -> int: ...
