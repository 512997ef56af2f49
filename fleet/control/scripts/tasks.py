"""Calls of the scripts that write tasks: grant, claim, chunks, hand-off, loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fleet.control.scripts.calls import Arg, Call, script
from fleet.core.chunk import Chunk, Location, encode_chunk, encode_location
from fleet.core.events import ChunkAppended, TaskFailed, encode_event
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId
from fleet.core.pages import PagesRef, encode_pages


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk to append to its edge's log. `location`: location of its remote tensors. `event`: set
    for the first chunk, boundaries and the last chunk. `finish`: True if the chunk ends the
    producing task. `num_items`: number of tokens, frames or other items in the chunk. `asks`: True
    if the conductor decides the walk to which the consumer changes at this chunk.
    """

    stage: StageName
    consumer: StageName
    chunk: Chunk
    location: Location
    event: ChunkAppended | None
    finish: bool
    num_items: int
    asks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """New location of the remote tensors of a chunk that was appended earlier and that its task has
    recomputed.
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
    """Acknowledgement that `stage` has consumed `consumed` chunks of `edge` since the edge's start.
    `producer`: the stage that gets the credit.

    `delivered`: True if the gateway has read the last chunk of the last client edge, which ends the
    client's task. `closed`: True if the consumer has ended and reads no more; the producer must not
    wait for it.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    edge: EdgeName
    consumed: int
    producer: StageName
    delivered: bool = False
    closed: bool = False


class CreditWait(NamedTuple):
    """An output edge without credit, and the total number of chunks that the edge's consumer must
    have acknowledged before the task continues.
    """

    edge: EdgeName
    consumer: StageName
    enough: int


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
    """Claim a granted task. `entry`: id of the grant in the role's stream; "" if the grant arrived
    in the worker's inbox.

    A successful claim answers the logs of the edges `inputs` and `outputs` (edge -> consumer), and,
    with `reads_prompt_audio`, the audio of the prompt.
    """
    task = (request, stage, epoch)
    edges = (len(inputs), *inputs)
    return Call.of("claim", worker, role, entry, task, reads_prompt_audio, edges, outputs or {})


@script
def read_grants(worker: WorkerId, role: RoleName, free: int) -> Call:
    """Reserve up to `free` grants of a role for a worker, which must claim them. Answers the grants
    as stream entries: first tasks that the role had before, then new tasks, both in their order.
    Answers "unlisted" or "draining" if the worker may not claim grants.
    """
    ...


@script
def reserve(
    worker: WorkerId, role: RoleName, entry: str, request: RequestId, stage: StageName, epoch: Epoch
) -> Call:
    """Reserve a suspect task for a worker until nothing else runs there and the worker can claim
    the task. Answers "ok", the task's group, and request, stage and epoch of each further task of
    the group, which is reserved too; else a refusal. A repeated call checks the reservation.
    """
    ...


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
            "1" if item.finish else "",
            item.num_items,
            chunk.num_rows,
            "1" if item.asks else "",
        )
    return Call("append", tuple(args))


def ack(acks: Sequence[Ack]) -> Call:
    args: list[Arg] = []
    for a in acks:
        flags = "1" if a.delivered else "", "1" if a.closed else ""
        args += (a.request, a.stage, a.epoch, a.edge, a.consumed, a.producer, *flags)
    return Call("ack", tuple(args))


def relocate(moved: Relocation) -> Call:
    return Call.of(
        "relocate",
        moved.request,
        moved.stage,
        moved.epoch,
        moved.edge,
        moved.consumer,
        moved.index,
        encode_location(moved.location),
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
    """Offer a task to a worker of another role, which continues it. The KV blocks of its `num_rows`
    positions are in the pool pages `pages`, at `location` in an arena, or in `data`; without all
    three, the new owner recomputes them.

    `produced`: number of chunks that must be in the log of each output edge before the new owner
    reads it. `prefilled_us`: end of the present owner's last step, for the trace.
    """
    return Call.of(
        "hand_off",
        request,
        stage,
        epoch,
        worker,
        role,
        num_rows,
        encode_pages(pages) if pages else b"",
        encode_location(location) if location else b"",
        data,
        prefilled_us,
        produced or {},
    )


@script
def confirm(request: RequestId, stage: StageName, epoch: Epoch) -> Call: ...


@script
def decline(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """Withdraw, as the task's new owner, the KV blocks offered with it, since they cannot be
    imported.
    """
    ...


@script
def release(request: RequestId, stage: StageName, worker: WorkerId) -> Call: ...


@script
def set_task_metadata(
    request: RequestId, stage: StageName, epoch: Epoch, name: str, line: bytes
) -> Call:
    """Save `line` in the task's hash under `name`, for the trace of the request."""
    ...


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
    """Record that `worker` caches the KV of `num_rows` positions, for the session's next request,
    for `keep_s` seconds; 0 records no cached prefix. `reused`: number of positions that this task
    itself took from the cache, for the trace.
    """
    keep_ms = int(keep_s * 1000)
    task = (request, stage, epoch)
    return Call.of("cache_prefix", task, worker, session, num_rows, reused, keep_ms)


def adopt_prefix(worker: WorkerId, stage: StageName, session: str, *, keep_s: float) -> Call:
    """Record that `worker` caches a session that was loaded from a file, for `keep_s` seconds."""
    return Call.of("adopt_prefix", worker, stage, session, int(keep_s * 1000))


@script
def lose_tensors(request: RequestId, stage: StageName, epoch: Epoch, producer: StageName) -> Call:
    """Report that `stage` cannot pull the tensors that the stage `producer` published, because the
    worker that held them is gone.
    """
    ...


@script
def lose_tasks(tasks: Sequence[tuple[RequestId, StageName, Epoch]]) -> Call:
    """Report that a step failed as a whole and lost these tasks. The loss counts as a worker's
    death over each task, although the worker lives.
    """
    ...


@script
def park(request: RequestId, stage: StageName, epoch: Epoch, waits: Sequence[CreditWait]) -> Call:
    """Give up a task that waits for credit, until its consumers have acknowledged enough. The
    answer is "parked"; or "credit", and the number of chunks acknowledged on each edge, if enough
    has arrived meanwhile.
    """
    ...


@script
def park_starved(
    request: RequestId,
    stage: StageName,
    epoch: Epoch,
    inputs: Sequence[tuple[EdgeName, StageName, int]],
) -> Call:
    """Give up a task that has read all its input and waits for a parked task. `inputs`: name,
    producer and number of consumed chunks of each input edge. The answer is "parked"; or "input" if
    no producer is parked or more chunks have arrived, and the task keeps its owner.
    """
    ...


@script
def suspect_task(request: RequestId, stage: StageName, epoch: Epoch) -> Call:
    """Report that the connections of the owner's route broke while the route computed part of a
    step of this task. If a process of the route is seen to have died, the death counts against the
    task.
    """
    ...


@script
def report_idle(
    request: RequestId, stage: StageName, epoch: Epoch, taken: Mapping[EdgeName, int]
) -> Call:
    """Report that a task waits for input. `taken`: total number of chunks that the task has
    processed, by input edge. If the worker dies before more input arrives, the death does not count
    against the task.
    """
    ...


def fail(event: TaskFailed) -> Call:
    task = (event.request, event.stage, event.epoch)
    return Call.of("fail", task, encode_event(event), event.code, event.message, event.param)


@script
def set_walk(
    leader: str,
    boundary: str,
    request: RequestId,
    stage: StageName,
    edge: EdgeName,
    from_index: int,
    walk: Walk | None,
) -> Call:
    """Decide the walk of `stage` from chunk `from_index` of its input `edge` on, in the role of the
    conductor. `boundary`: id of the boundary's entry, which is deleted. `walk`: the next walk; None
    if the stage keeps its walk. A walk that was set before for the same chunk remains.
    """
    ...


@script
def redeliver(request: RequestId, stage: StageName, epoch: Epoch, by: str = "") -> Call:
    """Revoke a task and grant it again at a higher epoch, by right of the API. `epoch`: the task's
    epoch as the operator saw it; 0 for any. `by`: name of the API key that orders it, for the
    journal.
    """
    ...
