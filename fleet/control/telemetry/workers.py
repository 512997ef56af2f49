"""Views of workers, recent former ones included, and totals of their transfers. Knows no request's
trace.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import msgspec
import redis.asyncio

from fleet.control import keys
from fleet.control.connect import number, pairs, slices, text
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId, stage_of
from fleet.drafts.figures.speculation import WorkerDrafts, decode_speculation
from fleet.spans.protocol.figures import SpanFigures, SpanPart, decode_figures
from fleet.telemetry.hops import HopCounts, decode_hops
from fleet.telemetry.pulls import PullCounts, decode_pulls
from fleet.telemetry.views import EdgeTransfer, TaskRef, Transfers, WorkerTransfer, WorkerView

Fields = Mapping[str, bytes]
MAX_TASKS = 100
SLICE = 100
"""Workers that are read in one round trip."""
MS = 1000


async def read_workers(client: redis.asyncio.Redis, *, with_gone: bool = False) -> list[WorkerView]:
    """Read workers by role, then gateways, late ones included; `with_gone`: then those that ended
    lately, the latest first.
    """
    pipe = client.pipeline(transaction=False)
    pipe.zrange(keys.WORKERS, 0, -1, withscores=True)
    pipe.zrevrange(keys.GONE, 0, -1)
    pipe.time()
    listed, gone, (seconds, micros) = cast(
        "tuple[list[tuple[bytes, float]], list[bytes], tuple[int, int]]",
        tuple(await pipe.execute()),
    )
    present = [WorkerId(text(name)) for name, _ in listed]
    departed = [WorkerId(text(name)) for name in gone] if with_gone else []
    for worker in present:
        pipe.hgetall(keys.worker(worker))
        pipe.smembers(keys.worker_tasks(worker))
    for worker in departed:
        pipe.hgetall(keys.gone(worker))
    replies = cast("list[object]", await pipe.execute()) if present or departed else []
    hashes, tasks = replies[: 2 * len(present) : 2], replies[1 : 2 * len(present) : 2]
    now_us = seconds * 1_000_000 + micros
    listed_views = [
        _worker(
            worker,
            pairs(fields),
            lease_left_s=(deadline - now_us) / 1e6,
            held=cast("set[bytes]", held),
        )
        for worker, (_, deadline), fields, held in zip(present, listed, hashes, tasks, strict=True)
        if fields
    ]
    gone_views = [
        _worker(w, pairs(fields))
        for w, fields in zip(departed, replies[2 * len(present) :], strict=True)
        if fields
    ]
    return [
        *sorted(
            listed_views, key=lambda view: (not view.role, view.role, view.started_us, view.id)
        ),
        *gone_views,
    ]


async def read_gaps(client: redis.asyncio.Redis, role: RoleName) -> list[str]:
    """Return, for each worker of a role that accepts tasks, the layers that it lacks; "" for
    none.
    """
    pipe = client.pipeline(transaction=False)
    for worker in await client.zrange(keys.role_workers(role, "accepting"), 0, -1):
        pipe.hget(keys.worker(WorkerId(text(worker))), "gap")
    return [text(gap) for gap in cast("list[bytes | None]", await pipe.execute())]


def _state(fields: Fields, lease_left_s: float) -> str:
    if lease_left_s <= 0:
        return "late"
    for state in ("leaving", "draining", "standby"):
        if number(fields, state):
            return state
    return "ready"


def _worker(
    worker: WorkerId,
    fields: Fields,
    *,
    lease_left_s: float | None = None,
    held: Set[bytes] = frozenset(),
) -> WorkerView:
    """`lease_left_s` None: the worker is gone."""
    hops = decode_hops(text(fields.get("hops")))
    tasks = sorted(text(pair).partition("|") for pair in held)[:MAX_TASKS]
    is_gone = lease_left_s is None
    return WorkerView(
        id=worker,
        role=text(fields.get("role")),
        host=text(fields.get("host")),
        pid=number(fields, "pid"),
        state=(text(fields.get("how")) or "left")
        if lease_left_s is None
        else _state(fields, lease_left_s),
        started_us=number(fields, "started_us"),
        ended_us=number(fields, "ended_us") if is_gone else 0,
        cause=text(fields.get("cause")),
        lease_left_s=round(lease_left_s or 0.0, 3),
        device=text(fields.get("device")),
        package=text(fields.get("package")),
        checkpoint=text(fields.get("checkpoint")),
        protocol=text(fields.get("protocol")),
        running=0 if is_gone else number(fields, "running"),
        capacity=number(fields, "capacity"),
        memory_bytes=number(fields, "memory_bytes"),
        cpu_percent=number(fields, "cpu_percent"),
        gpu=text(fields.get("gpu")),
        gpu_total_bytes=number(fields, "gpu_total_bytes"),
        gpu_used_bytes=number(fields, "gpu_used_bytes"),
        gpu_own_bytes=number(fields, "gpu_own_bytes"),
        gpu_percent=number(fields, "gpu_percent") if "gpu_percent" in fields else None,
        pages_used=number(fields, "pages_used"),
        pages_total=number(fields, "pages_total"),
        pages_kept=number(fields, "pages_kept"),
        rows_reused=number(fields, "rows_reused"),
        slots_used=number(fields, "slots_used"),
        hop_p50_us=hops.percentile_us(50),
        hop_p95_us=hops.percentile_us(95),
        tasks=tuple(
            TaskRef(request=RequestId(request), stage=StageName(stage))
            for request, _, stage in tasks
        ),
        transfer=_transfer(worker, fields),
        part=_part(fields),
        speculation=decode_speculation(text(fields.get("speculation"))),
    )


def drafts_of(stage: StageName, workers: Sequence[WorkerView]) -> tuple[WorkerDrafts, ...]:
    """Return the drafts of the stage's workers."""
    return tuple(
        WorkerDrafts(
            worker=view.id,
            acceptance_length=view.speculation.acceptance_length,
            figures=view.speculation,
        )
        for view in workers
        if view.role and stage_of(RoleName(view.role)) == stage and view.speculation is not None
    )


def _part(fields: Fields) -> SpanPart | None:
    is_anchor = "worker_spans" in fields
    if not is_anchor and "span_address" not in fields:
        return None
    route = cast("list[tuple[str, str]]", msgspec.json.decode(fields.get("route") or b"[]"))
    configured = text(fields.get("worker_spans"))
    return SpanPart(
        is_anchor=is_anchor,
        span=text(fields.get("span")),
        anchor=text(fields.get("anchor")),
        worker_spans=tuple(span for _, span in route)
        or tuple(configured.split(",") if configured else ()),
        hops=tuple(WorkerId(worker) for worker, _ in route),
        gap=text(fields.get("gap")),
        figures=decode_figures(text(fields.get("span_figures"))) or SpanFigures(),
    )


def _transfer(worker: WorkerId, fields: Fields) -> WorkerTransfer | None:
    backend = text(fields.get("backend"))
    if not backend:
        return None
    pulls = decode_pulls(text(fields.get("pulls"))).values()
    return WorkerTransfer(
        worker=worker,
        role=text(fields.get("role")),
        backend=backend,
        registered_bytes=number(fields, "registered_bytes"),
        used_bytes=number(fields, "used_bytes"),
        slots_used=number(fields, "slots_used"),
        in_flight=sum(counts.in_flight for counts in pulls),
        num_pulls=sum(counts.num_pulls for counts in pulls),
        num_failed=sum(counts.num_failed for counts in pulls),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Totals over the listed workers: tasks by role, pulls by edge."""

    running: Mapping[RoleName, int]
    pulls: Mapping[str, PullCounts]


async def read_load(client: redis.asyncio.Redis) -> FleetLoad:
    running: dict[RoleName, int] = {}
    pulls: list[str] = []
    for role, number_running, counts in await _fields_of_all(client, "role", "running", "pulls"):
        if role:
            running[RoleName(role)] = running.get(RoleName(role), 0) + int(number_running or 0)
        pulls.append(counts)
    return FleetLoad(running=running, pulls=_total_pulls(pulls))


async def read_pulls(client: redis.asyncio.Redis) -> dict[str, PullCounts]:
    """Sum the pulls by edge over the listed workers."""
    return _total_pulls(counts for (counts,) in await _fields_of_all(client, "pulls"))


def _total_pulls(all_counts: Iterable[str]) -> dict[str, PullCounts]:
    total: dict[str, PullCounts] = {}
    for raw in all_counts:
        for edge, counts in decode_pulls(raw).items():
            total[edge] = total[edge] + counts if edge in total else counts
    return total


async def read_hops(client: redis.asyncio.Redis) -> HopCounts:
    """Sum the ages of chunks on arrival over the listed workers."""
    return sum((decode_hops(raw) for (raw,) in await _fields_of_all(client, "hops")), HopCounts())


async def _fields_of_all(client: redis.asyncio.Redis, *fields: str) -> list[list[str]]:
    """Read these fields of every listed worker, in slices: the other tasks of the event loop must
    not wait for a large fleet.
    """
    listed = [
        WorkerId(text(name))
        for name in cast("list[bytes]", await client.zrange(keys.WORKERS, 0, -1))
    ]
    found: list[list[str]] = []
    for workers in slices(listed, SLICE):
        pipe = client.pipeline(transaction=False)
        for worker in workers:
            pipe.hmget(keys.worker(worker), fields)
        found += [
            list(map(text, values))
            for values in cast("list[list[bytes | None]]", await pipe.execute())
        ]
    return found


def transfers_of(
    workers: Sequence[WorkerView], pulls: Mapping[str, PullCounts], bytes_per_s: Mapping[str, float]
) -> Transfers:
    return Transfers(
        edges=tuple(
            _edge(name, counts, bytes_per_s.get(name, 0.0)) for name, counts in pulls.items()
        ),
        workers=tuple(
            view.transfer for view in workers if view.transfer is not None and not view.gone
        ),
    )


def _edge(name: str, counts: PullCounts, bytes_per_s: float) -> EdgeTransfer:
    durations = decode_hops(counts.durations)
    return EdgeTransfer(
        edge=name,
        num_pulls=counts.num_pulls,
        num_bytes=counts.num_bytes,
        num_failed=counts.num_failed,
        in_flight=counts.in_flight,
        bytes_per_s=round(bytes_per_s, 1),
        p50_ms=_ms(durations, 50),
        p95_ms=_ms(durations, 95),
        durations=tuple(durations.counts),
    )


def _ms(durations: HopCounts, percent: float) -> float | None:
    found = durations.percentile_us(percent)
    return None if found is None else round(found / MS, 3)
