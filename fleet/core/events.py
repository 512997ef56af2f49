"""Events, named in the past tense. Events wake the conductor and feed the console; the hashes in
Redis are authoritative.
"""

import msgspec

from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all events."""


class RequestSubmitted(Event, frozen=True, kw_only=True):
    """`outputs` are the requested client edges; they and the graph determine the stages."""

    request: RequestId
    graph: str
    outputs: tuple[EdgeName, ...]


class TaskEvent(Event, frozen=True, kw_only=True):
    """Base of the events of one task. `epoch`: the task's at that time."""

    request: RequestId
    stage: StageName
    epoch: Epoch


class TaskGranted(TaskEvent, frozen=True, kw_only=True):
    """The task is offered to a role, or to a worker that caches its session's prefix."""


class TaskClaimed(TaskEvent, frozen=True, kw_only=True):
    owner: WorkerId


class ChunkAppended(Event, frozen=True, kw_only=True):
    """Sent for the first chunk, each boundary and the last only: an event for every chunk would
    wake all readers at each step.
    """

    request: RequestId
    edge: EdgeName
    index: int
    boundary: bool = False
    producer_walk: Walk | None = None
    ordinal: int = 0
    final: bool = False

    @staticmethod
    def of(chunk: Chunk) -> "ChunkAppended":
        return ChunkAppended(
            request=chunk.request,
            edge=chunk.edge,
            index=chunk.index,
            boundary=chunk.boundary,
            producer_walk=chunk.producer_walk or None,
            ordinal=chunk.ordinal,
            final=chunk.final,
        )


class TaskFinished(TaskEvent, frozen=True, kw_only=True):
    """The task's last chunk was appended."""


class TaskFailed(TaskEvent, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None


class TaskLost(TaskEvent, frozen=True, kw_only=True):
    """The task's owner was fenced; its epoch has been raised. TaskGranted follows, unless the
    conductor must decide.

    `deaths`: number of workers that died over it since its last append. `alone`: this one ran
    nothing else.
    """

    deaths: int = 0
    alone: bool = False


class TaskHandedOff(TaskEvent, frozen=True, kw_only=True):
    """Its owner handed it off at `epoch`, for a worker of `role` to continue."""

    role: RoleName


class ClientGone(Event, frozen=True, kw_only=True):
    """Produced by the driver's clock, never stored: no gateway has attached to the client edges
    since the last one was lost.
    """

    request: RequestId
    epoch: Epoch


class RequestEnded(Event, frozen=True, kw_only=True):
    """`state` is finished, failed or aborted."""

    request: RequestId
    state: str
    reason: str = ""


class WorkerJoined(Event, frozen=True, kw_only=True):
    worker: WorkerId
    role: str


class WorkerLeft(Event, frozen=True, kw_only=True):
    """`how`: `left` (it deregistered), `died` (a supervisor saw its process end), `lapsed` (its
    lease ran out).

    `cause`: the signal or exit status of one that died, if known.
    """

    worker: WorkerId
    how: str = ""
    cause: str = ""


class GrantOverdue(TaskEvent, frozen=True, kw_only=True):
    """Produced by the driver's clock, never stored: no worker claimed this grant in time."""


class RoleDeserted(TaskEvent, frozen=True, kw_only=True):
    """Produced by the driver's clock, never stored: this grant's role has had no worker for
    `lease.no_worker_timeout_s`.
    """


class WorkerExpired(Event, frozen=True, kw_only=True):
    """Produced by the driver's clock, never stored: the lease was not renewed for its duration
    since it had this deadline.
    """

    worker: WorkerId
    deadline_us: int


AnyEvent = (
    RequestSubmitted
    | TaskGranted
    | TaskClaimed
    | ChunkAppended
    | TaskFinished
    | TaskFailed
    | TaskLost
    | TaskHandedOff
    | RequestEnded
    | WorkerJoined
    | WorkerLeft
    | GrantOverdue
    | RoleDeserted
    | WorkerExpired
    | ClientGone
)

_encoder = msgspec.json.Encoder()
decode_event = msgspec.json.Decoder(AnyEvent).decode


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)
