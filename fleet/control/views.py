"""What the console, `fleet status` and the API show: typed snapshots read from Redis. Never written back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import redis.asyncio

from fleet.control import keys, scripts
from fleet.control.connect import pairs, run_async, text
from fleet.core.hand_off import HandOff, decode_hand_off
from fleet.core.hops import HopCounts, decode_hops
from fleet.core.ids import EdgeName, RequestId, StageName, WorkerId
from fleet.core.request import decode_request
from fleet.graphs import get_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One live worker or gateway, its counts as of its last renewal.

    `hops`: how old chunks were when they reached it, counted since it joined.
    Units: `started_us` since 1970 on Redis's clock; `lease_left_s` may be negative just before its end; pages of its KV pool;
    `pages_kept` of `pages_used` wait for the next turns of conversations, which have spared its engine `rows_reused` rows so far;
    `slots_used` of its transfer arena. `draining`: it is leaving, finishes what it has and takes nothing new. `standby`: it takes
    nothing until a worker of its role is gone.
    """

    id: WorkerId
    role: str
    host: str
    pid: int
    started_us: int
    lease_left_s: float
    running: int
    capacity: int
    pages_used: int = 0
    pages_total: int = 0
    pages_kept: int = 0
    rows_reused: int = 0
    slots_used: int = 0
    draining: bool = False
    standby: bool = False
    hops: HopCounts = field(default_factory=HopCounts)

    @property
    def takes_tasks(self) -> bool:
        """Whether it counts as capacity."""
        return self.lease_left_s > 0 and not self.draining and not self.standby


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """What waits for a role and who serves it.

    Units: `queue_depth` tasks granted and not claimed; `lag` those of them that no worker has read yet, so the rest is being
    claimed at this moment; `oldest_s` seconds since the oldest of them was granted, 0 without one. `workers` counts those that
    take tasks, `capacity` their slots, `draining` those that leave, `standby` those that wait to take a lost one's place,
    `starting` those that are being loaded; `running` counts the tasks of all.
    """

    role: str
    queue_depth: int
    lag: int
    oldest_s: float
    workers: int
    draining: int
    standby: int
    running: int
    capacity: int
    starting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """`hand_off`: how its decode came to another worker than its prefill, once that one has gone on. `spared`: the rows of it
    that its session's earlier turn had computed.
    """

    stage: StageName
    state: str
    owner: str
    walk: str
    epoch: int
    hand_off: HandOff | None = None
    cached_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeView:
    """`produced` and `consumed` count chunks; `items` counts what they hold (tokens, frames)."""

    name: EdgeName
    source: StageName
    target: StageName
    produced: int
    consumed: int
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    id: RequestId
    graph: str
    state: str
    error: str
    created_us: int
    ended_us: int
    tasks: tuple[TaskView, ...]
    edges: tuple[EdgeView, ...]


async def read_workers(client: redis.asyncio.Redis) -> list[WorkerView]:
    """Every listed incarnation, gateways included (their role is "")."""
    pipe = client.pipeline(transaction=False)
    pipe.zrange(keys.WORKERS, 0, -1, withscores=True)
    pipe.time()
    listed, (seconds, micros) = cast("tuple[list[tuple[bytes, float]], tuple[int, int]]", tuple(await pipe.execute()))
    now = seconds * 1_000_000 + micros
    for worker, _ in listed:
        pipe.hgetall(keys.worker(WorkerId(text(worker))))
    hashes = cast("list[dict[bytes, bytes]]", await pipe.execute()) if listed else []
    return [_worker(text(w), deadline, now, pairs(h)) for (w, deadline), h in zip(listed, hashes, strict=True) if h]


def _worker(worker: str, deadline: float, now: int, fields: dict[str, bytes]) -> WorkerView:
    def number(name: str) -> int:
        return int(text(fields.get(name)) or 0)

    return WorkerView(
        id=WorkerId(worker),
        role=text(fields.get("role")),
        host=text(fields.get("host")),
        pid=number("pid"),
        started_us=number("started_us"),
        lease_left_s=(deadline - now) / 1e6,
        running=number("running"),
        capacity=number("capacity"),
        pages_used=number("pages_used"),
        pages_total=number("pages_total"),
        pages_kept=number("pages_kept"),
        rows_reused=number("rows_reused"),
        slots_used=number("slots_used"),
        draining=number("draining") > 0,
        standby=number("standby") > 0,
        hops=decode_hops(text(fields.get("hops"))),
    )


async def read_roles(client: redis.asyncio.Redis, names: Sequence[str]) -> list[RoleView]:
    """The given roles in their order, then any other that has a worker; gateways are none."""
    workers = [worker for worker in await read_workers(client) if worker.role]
    roles = list(dict.fromkeys([*names, *sorted(worker.role for worker in workers)]))
    queues = cast("list[list[object]]", await run_async(client, scripts.queues(roles)))
    expected = cast("list[tuple[bytes, bytes, int]]", await run_async(client, scripts.availability(0, roles)))
    return [
        _role(role, queue, [w for w in workers if w.role == role], starting)
        for role, queue, (_, _, starting) in zip(roles, queues, expected, strict=True)
    ]


def _role(role: str, queue: list[object], workers: list[WorkerView], starting: int) -> RoleView:
    depth, lag, oldest_us = (int(text(number)) for number in queue)
    return RoleView(
        role=role,
        queue_depth=depth,
        lag=lag,
        oldest_s=oldest_us / 1e6,
        workers=sum(worker.takes_tasks for worker in workers),
        draining=sum(worker.draining for worker in workers),
        standby=sum(worker.standby for worker in workers),
        running=sum(worker.running for worker in workers),
        capacity=sum(worker.capacity for worker in workers if worker.takes_tasks),
        starting=starting,
    )


async def read_request(client: redis.asyncio.Redis, request: RequestId) -> RequestView | None:
    """A request's story as the hashes tell it; None once its retention is over."""
    fields = pairs(cast("dict[bytes, bytes]", await client.hgetall(keys.request(request))))
    if "spec" not in fields:
        return None
    spec = decode_request(fields["spec"])
    graph = get_graph(spec.graph)
    stages = [StageName(s) for s in text(fields["stages"]).split(",")]
    edges = graph.edges_for(spec.outputs)
    pipe = client.pipeline(transaction=False)
    for stage in stages:
        pipe.hgetall(keys.task(request, stage))
    hashes = dict(zip(stages, [pairs(h) for h in cast("list[dict[bytes, bytes]]", await pipe.execute())], strict=True))
    views = [
        EdgeView(
            name=edge.name,
            source=edge.source,
            target=edge.target,
            produced=int(text(hashes[edge.source].get(f"produced:{edge.name}")) or 0),
            consumed=int(text(hashes[edge.target].get(f"consumed:{edge.name}")) or 0),
            items=int(text(hashes[edge.source].get(f"items:{edge.name}")) or 0),
        )
        for edge in edges
    ]
    return RequestView(
        id=request,
        graph=spec.graph,
        state=text(fields.get("state")),
        error=text(fields.get("message")),
        created_us=int(text(fields.get("created_us")) or 0),
        ended_us=int(text(fields.get("ended_us")) or 0),
        tasks=tuple(_task(stage, hashes[stage]) for stage in stages),
        edges=tuple(views),
    )


def _task(stage: StageName, fields: dict[str, bytes]) -> TaskView:
    return TaskView(
        stage=stage,
        state=text(fields.get("state")),
        owner=text(fields.get("holder")),
        walk=text(fields.get("walk")),
        epoch=int(text(fields.get("epoch")) or 0),
        hand_off=decode_hand_off(fields["told:hand_off"]) if "told:hand_off" in fields else None,
        cached_rows=int(text(fields.get("spared")) or 0),
    )
