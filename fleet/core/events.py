"""Events, named in the past tense: a trace of the fleet for the console and the laboratory. The
hashes in Redis are authoritative.
"""

import msgspec

from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all events."""


class RequestSubmitted(Event, frozen=True, kw_only=True):
    """Event: a client's request was submitted. `outputs`: requested client edges, which together
    with the graph determine the stages.
    """

    request: RequestId
    graph: str
    outputs: tuple[EdgeName, ...]


class TaskEvent(Event, frozen=True, kw_only=True):
    """Base of the events of one task. `epoch`: epoch of the task at the event."""

    request: RequestId
    stage: StageName
    epoch: Epoch


class TaskGranted(TaskEvent, frozen=True, kw_only=True):
    """Event: the task was offered to a role, or to the worker that caches its session's prefix."""


class TaskClaimed(TaskEvent, frozen=True, kw_only=True):
    owner: WorkerId


class ChunkAppended(Event, frozen=True, kw_only=True):
    """Event: a chunk was appended. Sent for the first chunk, each boundary and the last only, since
    an event for every chunk would wake all readers at each step.
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
    """Event: the task's last chunk was appended."""


class TaskFailed(TaskEvent, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None


class TaskLost(TaskEvent, frozen=True, kw_only=True):
    """Event: the task lost its owner, and its epoch was raised. TaskGranted follows, unless the
    request becomes a dead letter or the task is the client's.

    `deaths`: number of workers that were seen dying over the task since its last append. `alone`:
    True if the task ran alone when its owner died.
    """

    deaths: int = 0
    alone: bool = False


class TaskHandedOff(TaskEvent, frozen=True, kw_only=True):
    """Event: the task's owner handed it off at `epoch`, for a worker of `role` to continue."""

    role: RoleName


class RequestEnded(Event, frozen=True, kw_only=True):
    """Event: a request ended. `state` is finished, failed or aborted."""

    request: RequestId
    state: str
    reason: str = ""


class WorkerJoined(Event, frozen=True, kw_only=True):
    worker: WorkerId
    role: str


class WorkerLeft(Event, frozen=True, kw_only=True):
    """Event: a worker or gateway ended. `how`: `left` (it deregistered), `died` (a supervisor saw
    its process end) or `lapsed` (its lease ran out).

    `cause`: signal or exit status of a process that died; "" if unknown.
    """

    worker: WorkerId
    how: str = ""
    cause: str = ""


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
)

_encoder = msgspec.json.Encoder()
decode_event = msgspec.json.Decoder(AnyEvent).decode


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)
