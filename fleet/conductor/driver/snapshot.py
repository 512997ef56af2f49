"""Reading live requests back from the hashes: how a new leader learns what is true."""

from collections.abc import Iterator, Sequence
from typing import cast

import redis

from fleet.conductor.state import RequestRecord, TaskRecord, TaskState
from fleet.control import keys
from fleet.control.connect import exchange, text
from fleet.core.chunk import decode_chunk
from fleet.core.events import ChunkAppended, Event, TaskFailed, TaskLost
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, StageName, WorkerId, role_of
from fleet.core.request import decode_request
from fleet.graphs import get_graph


def read_live(client: redis.Redis) -> list[RequestId]:
    """Every request in `live`, the oldest first."""
    return sorted(RequestId(text(member)) for member in cast("set[bytes]", client.smembers(keys.LIVE)))


def read_request(client: redis.Redis, request: RequestId) -> RequestRecord | None:
    """As its hashes tell it; None if it has gone meanwhile."""
    raw = cast("bytes | None", client.hget(keys.request(request), "spec"))
    if raw is None:
        return None
    spec = decode_request(raw)
    tasks = _read_tasks(client, request, (*get_graph(spec.graph).stages_for(spec.outputs), CLIENT))
    delivered = tasks.pop(CLIENT).state is TaskState.FINISHED
    return RequestRecord(id=request, graph=spec.graph, outputs=spec.outputs, tasks=tasks, delivered=delivered)


def missed_facts(client: redis.Redis, record: RequestRecord, *, drives_walks: bool) -> list[Event]:
    """What ends a request, or turns a walk, and may have been told while nobody led; the hashes and logs keep it."""
    facts: list[Event] = []
    names = ("state", "epoch", "code", "message", "param", "deaths", "died_alone")
    for stage, fields in _read_fields(client, record.id, (*record.tasks, CLIENT), names).items():
        state, epoch, code, message, param, deaths, died_alone = fields
        at = Epoch(int(epoch or 0))
        if state == TaskState.LOST:
            alone = died_alone == "1"
            facts.append(TaskLost(request=record.id, stage=stage, epoch=at, deaths=int(deaths or 0), alone=alone))
        elif state == TaskState.FAILED:
            facts.append(TaskFailed(request=record.id, stage=stage, epoch=at, code=code, message=message, param=param or None))
    return [*facts, *(_boundaries(client, record) if drives_walks else ())]


def _boundaries(client: redis.Redis, record: RequestRecord) -> Iterator[ChunkAppended]:
    for edge in get_graph(record.graph).edges_for(record.outputs):
        if not edge.transitions:
            continue
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(keys.edge(record.id, edge.name)))
        for chunk in (decode_chunk(fields[b"h"]) for _, fields in entries):
            if chunk.boundary:
                yield ChunkAppended(
                    request=record.id,
                    edge=edge.name,
                    index=chunk.index,
                    boundary=True,
                    producer_walk=chunk.producer_walk,
                    ordinal=chunk.ordinal,
                )


def _read_tasks(client: redis.Redis, request: RequestId, stages: Sequence[StageName]) -> dict[StageName, TaskRecord]:
    fields = _read_fields(client, request, stages, ("state", "epoch", "owner", "alone", "role"))
    return {
        stage: TaskRecord(
            stage=stage,
            state=TaskState(state or "pending"),
            epoch=Epoch(int(epoch or 0)),
            owner=WorkerId(owner) if owner else None,
            alone=alone == "1",
            role=RoleName(role) if role else None,
        )
        for stage, (state, epoch, owner, alone, role) in fields.items()
    }


def _read_fields(
    client: redis.Redis, request: RequestId, stages: Sequence[StageName], names: Sequence[str]
) -> dict[StageName, list[str]]:
    """So many fields of each task, in one round trip: a new leader reads thousands."""
    replies = exchange(client, (), *(("HMGET", keys.task(request, stage), *names) for stage in stages))
    return {stage: [text(f) for f in cast("list[object]", reply)] for stage, reply in zip(stages, replies, strict=True)}


def is_nobodys(client: redis.Redis, request: RequestId, stage: StageName) -> bool:
    """Whether the task's grant has left its role's queue. One that still waits there is not lost: the role is merely busy.

    One that was put to a worker had a slot there; but one that is to run alone is kept by a worker that takes nothing else until
    it can, and granted again only where another of the role has nothing to do: else one worker after another would be closed.
    """
    found = cast("list[bytes | None]", client.hmget(keys.task(request, stage), ["role", "entry", "reserved_for", "alone"]))
    role, entry, to, alone = (text(f) for f in found)
    if to:
        return alone != "1" or _someone_idles(client, RoleName(role))
    if not role or not entry:
        return False
    groups = cast("list[dict[str, object]]", client.xinfo_groups(keys.role(RoleName(role))))
    last = text(groups[0]["last-delivered-id"]) if groups else "0-0"
    return _id(entry) <= _id(last)


def _someone_idles(client: redis.Redis, role: RoleName) -> bool:
    """Whether a worker of the role takes tasks, and has none."""
    listed = [WorkerId(text(name)) for name in cast("list[bytes]", client.zrange(keys.WORKERS, 0, -1))]
    serving = [worker for worker in listed if role_of(worker) == role]
    held = [("SCARD", keys.worker_tasks(worker)) for worker in serving]
    are = [("HMGET", keys.worker(worker), "draining", "standby") for worker in serving]
    replies = exchange(client, (), *held, *are)
    marks = [[text(mark) for mark in cast("list[object]", reply)] for reply in replies[len(serving) :]]
    return any(not tasks and not any(closed) for tasks, closed in zip(replies, marks, strict=False))


def _id(entry: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
