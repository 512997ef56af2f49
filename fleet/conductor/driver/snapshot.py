"""Reads the state of live requests from the hashes in Redis, for a new leader."""

from collections.abc import Iterator, Sequence
from typing import cast

from redis import Redis

from fleet.conductor.state import RequestRecord, TaskRecord, TaskState
from fleet.control import keys
from fleet.control.connect import (
    entry_order,
    exchange,
    pairs,
    stream_entries,
    text,
    texts,
    worker_ids,
)
from fleet.core.chunk import decode_chunk
from fleet.core.events import ChunkAppended, Event, TaskFailed, TaskLost
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import decode_request
from fleet.graphs import get_graph


def read_live(client: Redis) -> list[RequestId]:
    """Return every request in `live`, the oldest first."""
    return sorted(
        RequestId(text(member)) for member in cast("set[bytes]", client.smembers(keys.LIVE))
    )


def read_request(client: Redis, request: RequestId) -> RequestRecord | None:
    """Read one request from its hashes; None if it is gone."""
    raw = cast("bytes | None", client.hget(keys.request(request), "spec"))
    if raw is None:
        return None
    spec = decode_request(raw)
    tasks = _read_tasks(client, request, get_graph(spec.graph).stages_for(spec.outputs))
    return RequestRecord(id=request, graph=spec.graph, outputs=spec.outputs, tasks=tasks)


def missed_facts(client: Redis, record: RequestRecord, *, drives_walks: bool) -> list[Event]:
    """Return events, rebuilt from hashes and logs, that end `record`'s request or change a walk:
    the originals may have occurred while no conductor led.

    `drives_walks`: include the chunk boundaries at which the conductor changes walks.
    """
    facts: list[Event] = []
    names = ("state", "epoch", "code", "message", "param", "deaths", "died_alone")
    for stage, fields in _read_fields(client, record.id, (*record.tasks, CLIENT), names).items():
        state, epoch, code, message, param, deaths, died_alone = fields
        at = Epoch(int(epoch or 0))
        if state == TaskState.LOST:
            alone = died_alone == "1"
            facts.append(
                TaskLost(
                    request=record.id, stage=stage, epoch=at, deaths=int(deaths or 0), alone=alone
                )
            )
        elif state == TaskState.FAILED:
            facts.append(
                TaskFailed(
                    request=record.id,
                    stage=stage,
                    epoch=at,
                    code=code,
                    message=message,
                    param=param or None,
                )
            )
    return [*facts, *(_boundaries(client, record) if drives_walks else ())]


def _boundaries(client: Redis, record: RequestRecord) -> Iterator[ChunkAppended]:
    for edge in get_graph(record.graph).edges_for(record.outputs):
        if not edge.transitions:
            continue
        for _, fields in stream_entries(client.xrange(keys.edge(record.id, edge.name))):
            chunk = decode_chunk(fields["h"])
            if chunk.boundary:
                yield ChunkAppended.of(chunk)


def _read_tasks(
    client: Redis, request: RequestId, stages: Sequence[StageName]
) -> dict[StageName, TaskRecord]:
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
    client: Redis, request: RequestId, stages: Sequence[StageName], names: Sequence[str]
) -> dict[StageName, list[str]]:
    """Read the fields `names` of each stage's task in one round trip, since a new leader reads
    thousands of tasks. Returns the values by stage, in the order of `names`.
    """
    replies = exchange(
        client, (), *(("HMGET", keys.task(request, stage), *names) for stage in stages)
    )
    return {stage: texts(reply) for stage, reply in zip(stages, replies, strict=True)}


Grant = tuple[RequestId, StageName]


def lost_grants(client: Redis, grants: Sequence[Grant]) -> set[Grant]:
    """Return the unclaimed grants, among `grants`, that may be lost: a worker read the grant and
    did not claim it.

    A grant that still waits in its role's queue is not lost: the role is merely busy. A grant that
    is reserved for a worker had a free slot there, so it is overdue. A worker that has reserved a
    task to run alone accepts nothing else until it is idle; such a task counts as lost only if
    another worker of the role is idle, since otherwise one worker after another would stop
    accepting tasks.

    The number of round trips does not depend on the number of grants.
    """
    names = ("role", "entry", "reserved_for", "alone")
    replies = exchange(
        client, (), *(("HMGET", keys.task(request, stage), *names) for request, stage in grants)
    )
    fields = [tuple(texts(reply)) for reply in replies]
    waiting = {role for role, entry, to, _ in fields if role and entry and not to}
    delivered = _last_delivered(client, sorted(waiting))
    idle = {
        role: _has_idle_worker(client, RoleName(role))
        for role in {role for role, _, to, alone in fields if to and alone == "1"}
    }

    def is_lost(role: str, entry: str, to: str, alone: str) -> bool:
        if to:
            return alone != "1" or idle[role]
        return role in waiting and bool(entry) and entry_order(entry) <= delivered[role]

    return {
        grant
        for grant, (role, entry, to, alone) in zip(grants, fields, strict=True)
        if is_lost(role, entry, to, alone)
    }


def _last_delivered(client: Redis, roles: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return, by role, the id of the last stream entry that was delivered to a worker."""
    replies = (
        exchange(client, (), *(("XINFO", "GROUPS", keys.role(RoleName(role))) for role in roles))
        if roles
        else []
    )
    groups = [[pairs(group) for group in cast("list[object]", reply)] for reply in replies]
    return {
        role: entry_order(text(of_role[0]["last-delivered-id"]) if of_role else "0-0")
        for role, of_role in zip(roles, groups, strict=True)
    }


def _has_idle_worker(client: Redis, role: RoleName) -> bool:
    """Return True if the role has a worker that accepts tasks and owns none."""
    accepting = worker_ids(client.zrange(keys.role_workers(role, "accepting"), 0, -1))
    return any(
        not tasks
        for tasks in exchange(
            client, (), *(("SCARD", keys.worker_tasks(worker)) for worker in accepting)
        )
    )
