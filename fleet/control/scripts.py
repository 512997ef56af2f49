"""The fenced scripts as typed calls. A `Call` is data; `fleet.control.connect` loads the Lua and
sends calls.

The header of each script in `lua/` lists the values that it compares and writes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

import msgspec

from fleet.control.lua_source import source
from fleet.core.chunk import Chunk, Location, encode_chunk, encode_location
from fleet.core.events import (
    ChunkAppended,
    RequestSubmitted,
    TaskFailed,
    WorkerJoined,
    WorkerLeft,
    encode_event,
)
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId
from fleet.core.pages import PagesRef, encode_pages
from fleet.core.request import RequestSpec, encode_request
from fleet.telemetry.views import WorkerOrder

Arg = str | bytes | int
API_RIGHT = "api"
"""Right of `DELETE /v1/fleet/requests/{id}`: permits an abort regardless of the gateway that holds
the client edges.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script, ready to send."""

    script: str
    args: tuple[Arg, ...]


@cache
def sha(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


SCRIPTS = (
    "submit",
    "grant",
    "claim",
    "append",
    "ack",
    "fail",
    "set_walk",
    "end_request",
    "abort",
    "attach",
    "register",
    "renew",
    "fence_worker",
    "lead",
    "relocate",
    "lose_tensors",
    "lose_task",
    "hand_off",
    "confirm",
    "release",
    "set_task_metadata",
    "cache_prefix",
    "drain",
    "queues",
    "order",
    "redeliver",
    "record_playback",
    "record_metrics",
    "hold_voice",
    "save_voice",
    "end_voice",
    "reserve",
    "report_idle",
    "detach",
    "announce_start",
    "end_start",
    "assume_served",
    "availability",
    "admission",
    "leases",
    "fence_tasks",
    "stale_streams",
    "sweep",
    "set_route",
    "note_gap",
    "note_standby",
    "suspect_task",
    "adopt_prefix",
    "note_checkpoint",
    "add_version",
    "promote_version",
    "log_fact",
)


RETENTION_S, AUDIO_RETENTION_S = 600, 60
"""Usual retention of a request's keys after its end, and that of its audio, in logs and prompt,
which is large.
"""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk to append. `event` is set for the first chunk, boundaries and the last. `finish`
    ends the producing task.
    """

    stage: StageName
    consumer: StageName
    chunk: Chunk
    location: Location
    event: ChunkAppended | None
    finish: bool
    num_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """The remote tensors of an appended chunk were recomputed by its producing task, and are at
    `location` now.
    """

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

    `delivered`: the gateway has read the last chunk of the last client edge, which ends its task.
    `closed`: the consumer has ended and reads no more; its producer must not wait for it.
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
    """Return the default kind of a request: speech if it has more than one client edge, else
    text.
    """
    return "speech" if len(spec.outputs) > 1 else "text"


def submit(
    spec: RequestSpec,
    blob: bytes | None,
    *,
    bound: int,
    stages: Sequence[StageName],
    edges: Sequence[EdgeName],
    gateway: WorkerId,
    audio: Sequence[EdgeName] = (),
    roles: Sequence[RoleName] = (),
    grace_us: int = 0,
    retention_s: int = RETENTION_S,
    first_roles: Sequence[RoleName] = (),
) -> Call:
    """`first_roles`: the role to which each stage's task is granted; without them, the stages' own
    names.

    `retention_s`: the time for which the request's keys outlive it; those of the edges `audio`,
    `AUDIO_RETENTION_S`.

    Refused unless each of `roles` has a worker, lost its last one less than `grace_us` ago, or has
    one starting.
    """
    submitted = RequestSubmitted(request=spec.id, graph=spec.graph, outputs=spec.outputs)
    return Call(
        "submit",
        (
            bound,
            spec.id,
            encode_request(spec),
            blob or b"",
            ",".join(stages),
            ",".join(edges),
            ",".join(spec.outputs),
            gateway,
            encode_event(submitted),
            spec.session,
            spec.kind or kind_of(spec),
            spec.model,
            ",".join(audio),
            ",".join(roles),
            grace_us,
            retention_s,
            AUDIO_RETENTION_S,
            ",".join(first_roles or stages),
        ),
    )


def admission(
    request: RequestId, *, bound: int, gateway: WorkerId, roles: Sequence[RoleName], grace_us: int
) -> Call:
    """Return the answer that `submit` would give, with the number of requests that would be
    admitted.
    """
    return Call("admission", (bound, request, gateway, ",".join(roles), grace_us))


def grant(
    leader: str,
    request: RequestId,
    stage: StageName,
    role: RoleName,
    expected: Epoch,
    *,
    alone: bool = False,
) -> Call:
    return Call("grant", (leader, request, stage, role, expected, "1" if alone else ""))


def claim(
    worker: WorkerId,
    role: RoleName,
    entry: str,
    request: RequestId,
    stage: StageName,
    epoch: Epoch,
    inputs: Sequence[EdgeName] = (),
    outputs: Mapping[EdgeName, StageName] | None = None,
    *,
    reads_prompt_audio: bool = False,
) -> Call:
    """`entry` is "" if the grant arrived in the worker's inbox. A successful claim returns the logs
    of `inputs` and of `outputs` (edge -> consumer), and, with `reads_prompt_audio`, the audio of
    the prompt.
    """
    consumers = chain.from_iterable((outputs or {}).items())
    reads_audio = "1" if reads_prompt_audio else ""
    return Call(
        "claim",
        (worker, role, entry, request, stage, epoch, reads_audio, len(inputs), *inputs, *consumers),
    )


def reserve(
    worker: WorkerId, role: RoleName, entry: str, request: RequestId, stage: StageName, epoch: Epoch
) -> Call:
    """Reserve a task that must run alone until the worker can claim it. A repeated call answers
    whether it still may.
    """
    return Call("reserve", (worker, role, entry, request, stage, epoch))


def append(items: Sequence[Append]) -> Call:
    args: list[Arg] = []
    for item in items:
        chunk = item.chunk
        args += (
            chunk.request,
            item.stage,
            chunk.epoch,
            chunk.edge,
            item.consumer,
            chunk.index,
            encode_chunk(chunk),
            encode_location(item.location) if item.location else b"",
            encode_event(item.event) if item.event else b"",
            "1" if item.finish else "0",
            item.num_items,
            chunk.num_rows,
        )
    return Call("append", tuple(args))


def ack(acks: Sequence[Ack]) -> Call:
    args: list[Arg] = []
    for a in acks:
        flags = "1" if a.delivered else "0", "1" if a.closed else "0"
        args += (a.request, a.stage, a.epoch, a.edge, a.consumed, a.producer, *flags)
    return Call("ack", tuple(args))


def relocate(moved: Relocation) -> Call:
    return Call(
        "relocate",
        (
            moved.request,
            moved.stage,
            moved.epoch,
            moved.edge,
            moved.consumer,
            moved.index,
            encode_location(moved.location),
        ),
    )


def hand_off(
    request: RequestId,
    stage: StageName,
    epoch: Epoch,
    worker: WorkerId,
    role: RoleName,
    *,
    num_rows: int = 0,
    pages: PagesRef | None = None,
    location: Location | None = None,
    data: bytes = b"",
    prefilled_us: int = 0,
    produced: Mapping[EdgeName, int] | None = None,
) -> Call:
    """The KV blocks of `num_rows` rows are in `pages`, at `location`, or in `data`; if in none,
    they are recomputed.

    `produced`: the number of chunks of each output edge that must be in its log before the next
    owner reads it.
    `prefilled_us`: end of the source's last step, for the trace.
    """
    offered, at = (
        encode_pages(pages) if pages else b"",
        encode_location(location) if location else b"",
    )
    counts = chain.from_iterable((produced or {}).items())
    return Call(
        "hand_off",
        (request, stage, epoch, worker, role, num_rows, offered, at, data, prefilled_us, *counts),
    )


def confirm(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    return Call("confirm", (request, stage, epoch))


def release(request: RequestId, stage: StageName, worker: WorkerId) -> Call:
    return Call("release", (request, stage, worker))


def set_task_metadata(
    request: RequestId, stage: StageName, epoch: Epoch, name: str, line: bytes
) -> Call:
    """Save `line` in the task's hash under `name`, for the trace."""
    return Call("set_task_metadata", (request, stage, epoch, name, line))


def cache_prefix(
    request: RequestId,
    stage: StageName,
    epoch: Epoch,
    worker: WorkerId,
    session: str,
    *,
    num_rows: int,
    reused: int,
    keep_s: float,
) -> Call:
    """The worker caches `num_rows` rows for the session's next request. `reused`: rows that this
    task took from the cache.
    """
    return Call(
        "cache_prefix",
        (request, stage, epoch, worker, session, num_rows, reused, int(keep_s * 1000)),
    )


def lose_tensors(request: RequestId, stage: StageName, epoch: Epoch, producer: StageName) -> Call:
    """`stage` cannot pull the tensors that `producer` published: their holder is gone."""
    return Call("lose_tensors", (request, stage, epoch, producer))


def lose_task(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """A step failed as a whole, and the task with it: that counts as a death over the task,
    although the worker lives.
    """
    return Call("lose_task", (request, stage, epoch))


def suspect_task(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """A process died that computed a part of a pass of the task. The answer "lost": its owner has
    lost it.
    """
    return Call("suspect_task", (request, stage, epoch))


def report_idle(
    request: RequestId, stage: StageName, epoch: Epoch, taken: Mapping[EdgeName, int]
) -> Call:
    """The task waits for input: it has processed all of `taken`, its numbers of received chunks by
    input edge.
    """
    return Call("report_idle", (request, stage, epoch, *chain.from_iterable(taken.items())))


def fail(event: TaskFailed) -> Call:
    return Call(
        "fail",
        (
            event.request,
            event.stage,
            event.epoch,
            encode_event(event),
            event.code,
            event.message,
            event.param or "",
        ),
    )


def set_walk(
    leader: str, request: RequestId, stage: StageName, edge: EdgeName, from_index: int, walk: Walk
) -> Call:
    return Call("set_walk", (leader, request, stage, edge, from_index, walk))


def end_request(
    leader: str,
    request: RequestId,
    state: str,
    code: str,
    message: str,
    param: str | None,
    *,
    dead_stage: StageName | None = None,
) -> Call:
    """`dead_stage`: the stage whose workers died over the request, which becomes a dead letter."""
    return Call(
        "end_request", (leader, request, state, code, message, param or "", dead_stage or "")
    )


def abort(request: RequestId, right: str | Epoch, reason: str) -> Call:
    return Call("abort", (request, right, reason))


def attach(request: RequestId, gateway: WorkerId, *, held: Epoch | None = None) -> Call:
    """`held`: the epoch at which this gateway held the client edges; refused as stale if another
    holds them at a higher one.
    """
    return Call("attach", (gateway, request, "" if held is None else held))


def reattach(gateway: WorkerId, held: Mapping[RequestId, Epoch]) -> Call:
    """Attach several requests in one call. `held`: the epoch at which this gateway held each; 0
    takes it from any gateway.
    """
    return Call(
        "attach",
        (gateway, *chain.from_iterable((request, epoch or "") for request, epoch in held.items())),
    )


def detach(request: RequestId, gateway: WorkerId, epoch: Epoch) -> Call:
    """The gateway reads the answer no more: another may attach, or the conductor aborts the
    request.
    """
    return Call("detach", (request, gateway, epoch))


class EdgePosition(NamedTuple):
    """Part of a client edge that a gateway has: chunks received and acknowledged, epoch at which
    its producer was checked.

    `checked` is None if nothing more is read from the edge.
    """

    edge: EdgeName
    producer: StageName
    received: int
    checked: Epoch | None
    acked: int


class StreamPosition(NamedTuple):
    """Part of an answer that a gateway has, and the epoch at which it reads the answer. There is at
    least one edge.
    """

    request: RequestId
    gateway: WorkerId
    epoch: Epoch
    edges: Sequence[EdgePosition]


def stale_streams(streams: Sequence[StreamPosition]) -> Call:
    """Read only: the positions, in `streams`, of those for which Redis has something new."""
    args: list[Arg] = []
    for stream in streams:
        args += (stream.request, stream.gateway, stream.epoch, len(stream.edges))
        for at in stream.edges:
            args += (
                at.edge,
                at.producer,
                at.received,
                "" if at.checked is None else at.checked,
                at.acked,
            )
    return Call("stale_streams", tuple(args))


def register(
    worker: WorkerId,
    role: str,
    lease_us: int,
    fields: dict[str, str | bytes],
    *,
    replicas: int = 1,
    standby: int = 0,
) -> Call:
    """If `replicas` workers of the role accept tasks, up to `standby` more receive the answer
    "standby" and must wait.
    """
    joined = encode_event(WorkerJoined(worker=worker, role=role))
    return Call(
        "register",
        (worker, role, lease_us, joined, replicas, standby, *chain.from_iterable(fields.items())),
    )


def adopt_prefix(worker: WorkerId, stage: StageName, session: str, *, keep_s: float) -> Call:
    """The worker caches rows of a session that was loaded from a file."""
    return Call("adopt_prefix", (worker, stage, session, int(keep_s * 1000)))


def set_route(anchor: WorkerId, hops: Sequence[tuple[WorkerId, str]]) -> Call:
    """`hops`: each span worker and its span, in the order of the layers; without any, the workers
    of the last route are released.

    Answers "ok" and the generation, or a refusal.
    """
    return Call("set_route", (anchor, *chain.from_iterable(hops)))


def note_gap(anchor: WorkerId, gap: str, losses: Mapping[WorkerId, str] | None = None) -> Call:
    """Record the layers that an anchor's route lacks; "" for none.

    `losses`: why its span workers cannot leave, of those that cannot; None: each needs one in its
    place.
    """
    return Call("note_gap", (anchor, gap, "" if losses is None else json.dumps(losses)))


def note_checkpoint(trainer: WorkerId, name: str) -> Call:
    """Make a checkpoint the last durable one. Answers "ok", or "unlisted" once another trainer may
    be active.
    """
    return Call("note_checkpoint", (trainer, name))


def add_version(trainer: WorkerId, sha256: str, version: bytes) -> Call:
    """Add a version of the draft head, encoded with number 0. `trainer`: "" for an operator.

    Answers the version with its number, the known one of the same hash, or "unlisted".
    """
    return Call("add_version", (trainer, sha256, version))


def promote_version(
    worker: WorkerId, stage: StageName, expected: int | None, number: int, reason: str
) -> Call:
    """Let a stage draft with another version of the draft head; 0: that of the start. `worker`: ""
    for an operator.

    `expected`: the present one; None: any. Answers "ok", "stale" if another one is present,
    "unknown" or "unlisted".
    """
    return Call(
        "promote_version", (worker, stage, "" if expected is None else expected, number, reason)
    )


def note_standby(anchor: WorkerId, worker: WorkerId, span: str) -> Call:
    """Record the span that an unused worker has loaded to stand by."""
    return Call("note_standby", (anchor, worker, span))


def renew(worker: WorkerId, lease_us: int, vitals: Mapping[str, int | str]) -> Call:
    """`vitals` are metrics for the console that changed, such as running, pages_used and
    slots_used.
    """
    return Call("renew", (worker, lease_us, *chain.from_iterable(vitals.items())))


def leases() -> Call:
    """Read only: Redis's time (us), then for each listed process its id and the deadline and
    duration of its lease (us).
    """
    return Call("leases", ())


def fence_worker(
    leader: str, worker: WorkerId, *, deadline_us: int = 0, died: bool = False, cause: str = ""
) -> Call:
    """`leader` is "" if the worker deregisters or, with `died`, if a supervisor saw its process end
    by `cause`.

    `deadline_us`: the one that the leader saw unrenewed for the duration of the lease; with
    another, the worker is alive.
    """
    left = WorkerLeft(
        worker=worker, how="lapsed" if leader else "died" if died else "left", cause=cause
    )
    return Call(
        "fence_worker",
        (leader, worker, encode_event(left), "1" if died or leader else "", deadline_us),
    )


def fence_tasks(leader: str, worker: WorkerId) -> Call:
    """Continue `fence_worker` with more of the tasks; the answer is "more" until none is left."""
    return Call("fence_tasks", (leader, worker))


def sweep(leader: str, early: int = 0) -> Call:
    """Delete the audio of ended requests whose time is over, at least of the `early` oldest;
    "more": others are due.
    """
    return Call("sweep", (leader, early))


def announce_start(
    role: RoleName,
    place: str,
    lease_us: int,
    *,
    instead_of: str = "",
    child: str = "",
    workers: int | None = None,
    begins_us: int | None = None,
    number: int | None = None,
    stopped: bool = False,
    loaded_percent: int | None = None,
) -> Call:
    """A worker of `role` is starting at `place` (host:pid). `workers`: number of the role's workers
    in the deployment.

    From its process: `instead_of` is the keeper, whose announcement it continues, and
    `loaded_percent` is of its weights, None if it is not known. From the keeper: `begins_us` is the
    time until the process starts, `number` counts the keeper's starts, `child` is that process once
    it runs, `instead_of` the one before;
    `stopped`: that one was stopped and did not fail.
    """
    options = tuple("" if option is None else option for option in (workers, begins_us, number))
    loaded = "" if loaded_percent is None else loaded_percent
    return Call(
        "announce_start",
        (role, place, lease_us, instead_of, child, *options, "1" if stopped else "", loaded),
    )


def end_start(
    role: RoleName, place: str, *, child: str = "", took_us: int | None = None, failed: bool = False
) -> Call:
    """The announced start is over. `took_us`: its worker has joined, this long after the start was
    announced.

    `failed`: it counts as a failed start; else it was stopped. From a keeper, `child` is the
    process that may continue it.
    """
    return Call(
        "end_start", (role, place, child, "" if took_us is None else took_us, "1" if failed else "")
    )


def log_fact(level: str, process: str, worker: str, stage: str, message: str) -> Call:
    """Log a fact that no other script writes. `worker`, `stage`: labels of the line, "" for
    none.
    """
    return Call("log_fact", (level, process, worker, stage, message))


def assume_served(since_us: int, roles: Sequence[RoleName]) -> Call:
    """Redis restarted at `since_us`, and may have lost which roles had workers."""
    return Call("assume_served", (since_us, *roles))


def availability(grace_us: int, roles: Sequence[str]) -> Call:
    """Read only: for each role, whether it admits new requests and retains running ones, its number
    of starting workers, and the percentage of its weights that the most advanced of them has loaded
    (nothing if it is not known).
    """
    return Call("availability", (grace_us, *roles))


def drain(worker: WorkerId) -> Call:
    """The worker leaves: it claims no more grants, and deregisters (`fence_worker`) once its tasks
    have ended.
    """
    return Call("drain", (worker,))


def order(worker: WorkerId, action: WorkerOrder) -> Call:
    """An operator's order, by right of the API. A worker that is leaving accepts no order but to
    leave.
    """
    return Call("order", (worker, action))


def redeliver(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """Revoke a task from its owner, by right of the API. `epoch` 0: from the present owner."""
    return Call("redeliver", (request, stage, epoch))


def record_playback(request: RequestId, played_samples: int, underruns: int) -> Call:
    return Call("record_playback", (request, played_samples, underruns))


def record_metrics(counted: Mapping[str, int], seen: Mapping[str, int]) -> Call:
    """`counted` is added to this step of the time series; `seen` are gauges, equal for all
    gateways, which are overwritten.
    """
    return Call(
        "record_metrics", (len(counted), *chain.from_iterable((*counted.items(), *seen.items())))
    )


def queues(roles: Sequence[str]) -> Call:
    """Read only: the pending grants of each role's stream."""
    return Call("queues", tuple(roles))


def hold_voice(
    session: str, holder: WorkerId, keep_ms: int, owner: str, *, new: bool, bound: int
) -> Call:
    """`new`: the session must not exist yet; else it must exist and be `owner`'s. `bound`: see the
    script.
    """
    return Call("hold_voice", (session, holder, keep_ms, owner, "1" if new else "", bound))


def save_voice(
    session: str,
    epoch: int,
    ttl_ms: int,
    owner: str,
    fields: Mapping[str, bytes],
    removed: Sequence[str],
) -> Call:
    return Call(
        "save_voice",
        (
            session,
            epoch,
            ttl_ms,
            owner,
            len(removed),
            *removed,
            *chain.from_iterable(fields.items()),
        ),
    )


def end_voice(session: str, epoch: int | None) -> Call:
    """`epoch` None: by right of the API, regardless of the holder."""
    return Call("end_voice", (session, "" if epoch is None else epoch))


def lead(candidate: WorkerId, held: str, lease_ms: int) -> Call:
    return Call("lead", (candidate, held, lease_ms))
