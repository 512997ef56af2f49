"""Facts, in the past tense. They wake the conductor and feed the console; the hashes in Redis, not these, are the truth."""

import msgspec

from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all events."""


class RequestSubmitted(Event, frozen=True, kw_only=True):
    """`outputs` are the client edges wanted; the stages follow from the graph."""

    request: RequestId
    graph: str
    outputs: tuple[EdgeName, ...]


class TaskGranted(Event, frozen=True, kw_only=True):
    request: RequestId
    stage: StageName
    epoch: Epoch


class TaskClaimed(Event, frozen=True, kw_only=True):
    request: RequestId
    stage: StageName
    epoch: Epoch
    owner: WorkerId


class ChunkAppended(Event, frozen=True, kw_only=True):
    """Sent for the first chunk, each boundary and the last; never once per chunk, for that would wake everybody each step."""

    request: RequestId
    edge: EdgeName
    index: int
    boundary: bool = False
    producer_walk: Walk | None = None
    ordinal: int = 0
    final: bool = False


class TaskFinished(Event, frozen=True, kw_only=True):
    request: RequestId
    stage: StageName
    epoch: Epoch


class TaskFailed(Event, frozen=True, kw_only=True):
    request: RequestId
    stage: StageName
    epoch: Epoch
    code: str
    message: str
    param: str | None = None


class TaskLost(Event, frozen=True, kw_only=True):
    """The task's owner was fenced; its epoch has been raised.

    `deaths`: how many workers have died over it since it last appended anything. `alone`: this one ran nothing else.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    deaths: int = 0
    alone: bool = False


class TaskHandedOff(Event, frozen=True, kw_only=True):
    """Its owner gave it up at `epoch`, for a worker of `role` to go on with."""

    request: RequestId
    stage: StageName
    epoch: Epoch
    role: RoleName


class TensorsLost(Event, frozen=True, kw_only=True):
    """What the task at this epoch had published is gone with its worker, and its consumer waits for it."""

    request: RequestId
    stage: StageName
    epoch: Epoch


class AnswerDelivered(Event, frozen=True, kw_only=True):
    """The client has taken the last chunk of its last edge."""

    request: RequestId


class ClientGone(Event, frozen=True, kw_only=True):
    """Made by the driver's clock, never stored: nobody has taken up the client edges since their gateway was lost."""

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
    """`how`: `left` (it said goodbye), `died` (a supervisor saw its process end), `lapsed` (its lease ran out).

    `cause`: the signal or exit status of one that died, where it is known.
    """

    worker: WorkerId
    how: str = ""
    cause: str = ""


class GrantOverdue(Event, frozen=True, kw_only=True):
    """Made by the driver's clock, never stored: nobody claimed this grant in time."""

    request: RequestId
    stage: StageName
    epoch: Epoch


class RoleDeserted(Event, frozen=True, kw_only=True):
    """Made by the driver's clock, never stored: this grant waits for a role that nobody has served for long."""

    request: RequestId
    stage: StageName
    epoch: Epoch


class WorkerExpired(Event, frozen=True, kw_only=True):
    """Made by the driver's clock, never stored: the lease deadline has passed."""

    worker: WorkerId


AnyEvent = (
    RequestSubmitted
    | TaskGranted
    | TaskClaimed
    | ChunkAppended
    | TaskFinished
    | TaskFailed
    | TaskLost
    | TaskHandedOff
    | TensorsLost
    | AnswerDelivered
    | RequestEnded
    | WorkerJoined
    | WorkerLeft
    | GrantOverdue
    | RoleDeserted
    | WorkerExpired
    | ClientGone
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(raw: bytes) -> AnyEvent:
    return _decoder.decode(raw)
