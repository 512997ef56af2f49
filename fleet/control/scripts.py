"""The fenced scripts as typed calls. A `Call` is data; `Scripts` loads the Lua once and sends calls, alone or in a pipeline.

Each script's own header in `lua/` says what it compares and what it writes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain

from fleet.core.chunk import Chunk, Location, encode_chunk, encode_location
from fleet.core.events import AnswerDelivered, ChunkAppended, RequestSubmitted, TaskFailed, WorkerJoined, WorkerLeft, encode_event
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId
from fleet.core.pages import PagesRef, encode_pages
from fleet.core.request import RequestSpec, encode_request
from fleet.core.telemetry import WorkerOrder

Arg = str | bytes | int
API_RIGHT = "api"
"""The right of `DELETE /v1/fleet/requests/{id}`: it may abort whoever holds the client edge."""


@dataclass(frozen=True, slots=True)
class Call:
    """One script call, ready to send."""

    script: str
    args: tuple[Arg, ...]


@cache
def source(name: str) -> str:
    """The Lua of a script, common part included."""
    folder = resources.files("fleet.control") / "lua"
    return (folder / "common.lua").read_text() + (folder / f"{name}.lua").read_text()


@cache
def sha(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


SCRIPTS = (
    "submit", "grant", "claim", "append", "ack", "fail", "set_walk", "end_request", "abort", "attach", "register", "renew",
    "fence_worker", "lead", "relocate", "lose_tensors", "lose_task", "hand_off", "confirm", "release", "set_task_metadata",
    "cache_prefix", "drain", "queues", "order", "redeliver", "record_playback", "record_metrics", "hold_voice", "save_voice",
    "end_voice", "reserve", "report_idle", "announce_start", "end_start", "assume_served", "availability", "admission",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Units: seconds a request's keys outlive it; sound goes sooner, for it is large, and the answer's can be made again."""

    request_s: int = 600
    brief_edge_s: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """One chunk to append. `event` is set for the first chunk, boundaries and the last. `finish` ends the producing task."""

    stage: StageName
    consumer: StageName
    chunk: Chunk
    location: Location
    event: ChunkAppended | None
    finish: bool
    num_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """The remote tensors of an appended chunk were made again by its producing task, and lie at `location` now."""

    request: RequestId
    stage: StageName
    epoch: Epoch
    edge: EdgeName
    consumer: StageName
    index: int
    location: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """`consumed` chunks of `edge` have been consumed by `stage`; the credit goes to `producer`.

    `delivered`: a client has taken the last chunk of its last edge, which ends its task.
    `closed`: the consumer has ended and takes no more; its producer must not wait for it.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    edge: EdgeName
    consumed: int
    producer: StageName
    delivered: bool = False
    closed: bool = False


def kind_of(spec: RequestSpec) -> str:
    """What people look for a request by, where its gateway did not say: whether more than one edge goes to the client."""
    return "speech" if len(spec.outputs) > 1 else "text"


def submit(
    spec: RequestSpec,
    blob: bytes | None,
    *,
    bound: int,
    stages: Sequence[StageName],
    edges: Sequence[EdgeName],
    gateway: WorkerId,
    brief: Sequence[EdgeName] = (),
    roles: Sequence[RoleName] = (),
    grace_us: int = 0,
) -> Call:
    """`brief`: those of `edges` that are kept for `Retention.brief_edge_s` only, for they are large.

    Refused unless each of `roles` has a worker, lost its last one less than `grace_us` ago, or has one starting.
    """
    submitted = RequestSubmitted(request=spec.id, graph=spec.graph, outputs=spec.outputs)
    return Call(
        "submit",
        (bound, spec.id, encode_request(spec), blob or b"", ",".join(stages), ",".join(edges), ",".join(spec.outputs),
         gateway, encode_event(submitted), spec.session, spec.kind or kind_of(spec), spec.model, ",".join(brief),
         ",".join(roles), grace_us),
    )  # fmt: skip


def admission(request: RequestId, *, bound: int, gateway: WorkerId, roles: Sequence[RoleName], grace_us: int) -> Call:
    """Ask what `submit` would answer, and how many more requests would be admitted."""
    return Call("admission", (bound, request, gateway, ",".join(roles), grace_us))


def grant(
    leader: str, request: RequestId, stage: StageName, role: RoleName, expected: Epoch,
    *, alone: bool = False, remake: bool = False,
) -> Call:  # fmt: skip
    return Call("grant", (leader, request, stage, role, expected, "1" if alone else "", "1" if remake else ""))


def claim(
    worker: WorkerId, role: RoleName, entry: str, request: RequestId, stage: StageName, epoch: Epoch,
    inputs: Sequence[EdgeName] = (), outputs: Mapping[EdgeName, StageName] | None = None,
) -> Call:  # fmt: skip
    """`entry` is "" where the grant came into the worker's inbox. Who gets the right is told the logs of these edges with it: of
    `inputs`, and of `outputs`, edge -> consumer.
    """
    consumers = chain.from_iterable((outputs or {}).items())
    return Call("claim", (worker, role, entry, request, stage, epoch, len(inputs), *inputs, *consumers))


def reserve(worker: WorkerId, role: RoleName, entry: str, request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """The worker keeps a task that is to run alone, until it can claim it. Said again, it tells whether it still may."""
    return Call("reserve", (worker, role, entry, request, stage, epoch))


def append(items: Sequence[Append]) -> Call:
    args: list[Arg] = []
    for item in items:
        chunk = item.chunk
        args += (
            chunk.request, item.stage, chunk.epoch, chunk.edge, item.consumer, chunk.index, encode_chunk(chunk),
            encode_location(item.location) if item.location else b"", encode_event(item.event) if item.event else b"",
            "1" if item.finish else "0", item.num_items, chunk.num_rows,
        )  # fmt: skip
    return Call("append", tuple(args))


def ack(acks: Sequence[Ack]) -> Call:
    args: list[Arg] = []
    for a in acks:
        event = encode_event(AnswerDelivered(request=a.request)) if a.delivered else b""
        args += (a.request, a.stage, a.epoch, a.edge, a.consumed, a.producer, event, "1" if a.closed else "0")
    return Call("ack", tuple(args))


def relocate(moved: Relocation) -> Call:
    return Call(
        "relocate",
        (moved.request, moved.stage, moved.epoch, moved.edge, moved.consumer, moved.index, encode_location(moved.location)),
    )


def hand_off(
    request: RequestId, stage: StageName, epoch: Epoch, worker: WorkerId, role: RoleName,
    *, num_rows: int = 0, pages: PagesRef | None = None, location: Location | None = None, data: bytes = b"",
    prefilled_us: int = 0,
) -> Call:  # fmt: skip
    """The blocks of `num_rows` rows lie in `pages`, or at `location`, or are `data`, or nowhere: then they are computed again.

    `prefilled_us`: when the giver's last step had ended, for the story.
    """
    lent, where = encode_pages(pages) if pages else b"", encode_location(location) if location else b""
    return Call("hand_off", (request, stage, epoch, worker, role, num_rows, lent, where, data, prefilled_us))


def confirm(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    return Call("confirm", (request, stage, epoch))


def release(request: RequestId, stage: StageName, worker: WorkerId) -> Call:
    return Call("release", (request, stage, worker))


def set_task_metadata(request: RequestId, stage: StageName, epoch: Epoch, name: str, line: bytes) -> Call:
    """Adds `line` to the task's story under `name`."""
    return Call("set_task_metadata", (request, stage, epoch, name, line))


def cache_prefix(
    request: RequestId, stage: StageName, epoch: Epoch, worker: WorkerId, session: str, *, kept: int, spared: int, keep_s: float
) -> Call:
    """`kept` rows of the task stay with the worker for the session's next request; `spared` are those of its own that were so."""
    return Call("cache_prefix", (request, stage, epoch, worker, session, kept, spared, int(keep_s * 1000)))


def lose_tensors(request: RequestId, stage: StageName, epoch: Epoch, producer: StageName) -> Call:
    """`stage` cannot pull what `producer` published: its holder is gone."""
    return Call("lose_tensors", (request, stage, epoch, producer))


def lose_task(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """A step that failed as a whole took the task with it: it counts as a death over the task, and the worker lives."""
    return Call("lose_task", (request, stage, epoch))


def report_idle(request: RequestId, stage: StageName, epoch: Epoch, taken: Mapping[EdgeName, int]) -> Call:
    """The task waits: everything of `taken`, its chunks by input edge, is worked off."""
    return Call("report_idle", (request, stage, epoch, *chain.from_iterable(taken.items())))


def fail(event: TaskFailed) -> Call:
    told = (event.code, event.message, event.param or "")
    return Call("fail", (event.request, event.stage, event.epoch, encode_event(event), *told))


def set_walk(leader: str, request: RequestId, stage: StageName, edge: EdgeName, from_index: int, walk: Walk) -> Call:
    return Call("set_walk", (leader, request, stage, edge, from_index, walk))


def end_request(
    leader: str, request: RequestId, state: str, code: str, message: str, param: str | None, keep: Retention,
    *, dead_stage: StageName | None = None,
) -> Call:  # fmt: skip
    """`dead_stage`: the stage whose workers the request killed; it goes to the dead letters."""
    ends = (leader, request, state, code, message, param or "", keep.request_s, keep.brief_edge_s)
    return Call("end_request", (*ends, dead_stage or ""))


def abort(request: RequestId, right: str | Epoch, reason: str, keep: Retention) -> Call:
    return Call("abort", (request, right, reason, keep.request_s, keep.brief_edge_s))


def attach(request: RequestId, gateway: WorkerId, *, instead_of: WorkerId | None = None) -> Call:
    """`instead_of`: the gateway's own former id; refused as stale if another has taken the request over since."""
    return Call("attach", (request, gateway, instead_of or ""))


def register(
    worker: WorkerId, role: str, lease_us: int, fields: dict[str, str | bytes], *, replicas: int = 1, standby: int = 0
) -> Call:
    """Where `replicas` workers of the role take tasks, up to `standby` more are answered "standby": theirs is to wait."""
    pairs = [part for field in fields.items() for part in field]
    joined = encode_event(WorkerJoined(worker=worker, role=role))
    return Call("register", (worker, role, lease_us, joined, replicas, standby, *pairs))


def renew(worker: WorkerId, lease_us: int, vitals: Mapping[str, int | str]) -> Call:
    """`vitals` are counts for people to look at: running, pages_used, slots_used and the like."""
    pairs = [part for field in vitals.items() for part in field]
    return Call("renew", (worker, lease_us, *pairs))


def fence_worker(leader: str, worker: WorkerId, *, died: bool = False, cause: str = "") -> Call:
    """`leader` "" is the worker saying goodbye itself or, with `died`, a supervisor that saw its process end by `cause`."""
    left = WorkerLeft(worker=worker, how="lapsed" if leader else "died" if died else "left", cause=cause)
    return Call("fence_worker", (leader, worker, encode_event(left), "1" if died or leader else ""))


def announce_start(
    role: RoleName, place: str, lease_us: int, *, instead_of: str = "", child: str = "", workers: int | None = None,
    begins_us: int | None = None, number: int | None = None, stopped: bool = False,
) -> Call:  # fmt: skip
    """A worker of `role` is starting at `place` (host:pid). `workers`: how many the deployment has of the role.

    From its process: `instead_of` is the keeper, whose announcement it continues. From the keeper: `begins_us` is the time until
    the process starts, `number` counts the keeper's starts, `child` is that process once it runs, `instead_of` the one before;
    `stopped`: that one was stopped and did not fail.
    """
    known = tuple("" if given is None else given for given in (workers, begins_us, number))
    return Call("announce_start", (role, place, lease_us, instead_of, child, *known, "1" if stopped else ""))


def end_start(role: RoleName, place: str, *, child: str = "", took_us: int | None = None, failed: bool = False) -> Call:
    """The announced start is over. `took_us`: its worker has joined, so long after the start was announced.

    `failed`: it counts as a failed start; else it was stopped. From a keeper, `child` is the process that may continue it.
    """
    return Call("end_start", (role, place, child, "" if took_us is None else took_us, "1" if failed else ""))


def assume_served(since_us: int, roles: Sequence[RoleName]) -> Call:
    """Redis restarted at `since_us`, and may have lost which roles had workers."""
    return Call("assume_served", (since_us, *roles))


def availability(grace_us: int, roles: Sequence[str]) -> Call:
    """Reads only: whether each role admits new requests, keeps those in flight, and how many of its workers are starting."""
    return Call("availability", (grace_us, *roles))


def drain(worker: WorkerId) -> Call:
    """The worker says that it is leaving, when it stops taking grants; its goodbye (`fence_worker`) follows once it is done."""
    return Call("drain", (worker,))


def order(worker: WorkerId, what: WorkerOrder) -> Call:
    """People's right: whoever may call the API. A worker that is leaving already takes no order but to leave."""
    return Call("order", (worker, what))


def redeliver(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """People's right: whoever may call the API. `epoch` 0: whoever has the task by now."""
    return Call("redeliver", (request, stage, epoch))


def record_playback(request: RequestId, played_samples: int, underruns: int) -> Call:
    return Call("record_playback", (request, played_samples, underruns))


def record_metrics(counted: Mapping[str, int], seen: Mapping[str, int]) -> Call:
    """`counted` is added to this step of the time series; `seen` is what any gateway sees alike."""
    return Call("record_metrics", (len(counted), *(part for pair in (*counted.items(), *seen.items()) for part in pair)))


def queues(roles: Sequence[str]) -> Call:
    """Reads only: what waits in each role's stream."""
    return Call("queues", tuple(roles))


def hold_voice(session: str, holder: WorkerId, keep_ms: int, owner: str, *, new: bool, bound: int) -> Call:
    """`new`: one that must not exist yet; else one that must, and is `owner`'s. `bound`: see the script."""
    return Call("hold_voice", (session, holder, keep_ms, owner, "1" if new else "", bound))


def save_voice(session: str, epoch: int, ttl_ms: int, fields: Mapping[str, bytes], removed: Sequence[str]) -> Call:
    pairs = [part for field in fields.items() for part in field]
    return Call("save_voice", (session, epoch, ttl_ms, len(removed), *removed, *pairs))


VOICE_ENDED_MS = 600_000
"""An operator's end of a voice session is kept for so long: a client that is away for longer begins another one."""


def end_voice(session: str, epoch: int | None) -> Call:
    """`epoch` None: by the API's right, whoever holds it."""
    return Call("end_voice", (session, "" if epoch is None else epoch, VOICE_ENDED_MS))


def lead(candidate: WorkerId, held: str, lease_ms: int) -> Call:
    return Call("lead", (candidate, held, lease_ms))
