"""Views of workers and gateways, including those that have ended, and totals of their transfers.
Knows no request's trace.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import msgspec
from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import number, pairs, slices, text, texts, worker_ids
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId, stage_of
from fleet.drafts.figures.speculation import WorkerDrafts
from fleet.spans.protocol.figures import SpanFigures, SpanPart
from fleet.telemetry.counts import LatencyCounts, PullCounts, SentCounts
from fleet.telemetry.views import (
    GONE_LISTED_S,
    MAX_GONE_LISTED,
    EdgeTransfer,
    TaskRef,
    WorkerTransfer,
    WorkerView,
)
from fleet.telemetry.vitals import Fields, Vitals

MAX_TASKS = 100
SLICE = 100
"""Number of workers that are read in one round trip."""
TEXTS = ("role", "host", "cause", "device", "package", "checkpoint", "protocol")
NUMBERS = ("pid", "started_us", "capacity")
SHOWN = set(WorkerView.__struct_fields__) & set(Vitals.__struct_fields__)
"""Names of the statistics that `WorkerView` and `Vitals` have in common."""


async def read_workers(client: Redis, *, with_gone: bool = False) -> list[WorkerView]:
    """Read the workers by role, then the gateways. Processes whose lease has lapsed are included.
    `with_gone`: append processes that ended in the last `GONE_LISTED_S` seconds, at most
    `MAX_GONE_LISTED`, latest first.
    """
    pipe = client.pipeline(transaction=False)
    pipe.zrange(keys.WORKERS, 0, -1, withscores=True)
    pipe.zrevrange(keys.GONE, 0, MAX_GONE_LISTED - 1, withscores=True)
    pipe.time()
    listed, gone, (seconds, micros) = cast(
        "tuple[list[tuple[bytes, float]], list[tuple[bytes, float]], tuple[int, int]]",
        tuple(await pipe.execute()),
    )
    now_us = seconds * 1_000_000 + micros
    listed_from_us = now_us - GONE_LISTED_S * 1_000_000
    present = [WorkerId(text(name)) for name, _ in listed]
    departed = [
        WorkerId(text(name)) for name, ended_us in gone if with_gone and ended_us >= listed_from_us
    ]
    for worker in present:
        pipe.hgetall(keys.worker(worker))
        pipe.smembers(keys.worker_tasks(worker))
    for worker in departed:
        pipe.hgetall(keys.gone(worker))
    replies = cast("list[object]", await pipe.execute()) if present or departed else []
    hashes, tasks = replies[: 2 * len(present) : 2], replies[1 : 2 * len(present) : 2]
    listed_views = [
        _worker(
            worker,
            pairs(fields),
            lease_left_s=(deadline - now_us) / 1e6,
            tasks=cast("set[bytes]", owned),
        )
        for worker, (_, deadline), fields, owned in zip(present, listed, hashes, tasks, strict=True)
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


async def read_worker(client: Redis, worker: WorkerId) -> WorkerView | None:
    """Read one worker or gateway, also one that has ended, as long as its record is kept; None if
    it has no record.
    """
    pipe = client.pipeline(transaction=False)
    pipe.zscore(keys.WORKERS, worker)
    pipe.hgetall(keys.worker(worker))
    pipe.smembers(keys.worker_tasks(worker))
    pipe.hgetall(keys.gone(worker))
    pipe.time()
    deadline, present, tasks, gone, (seconds, micros) = cast(
        "tuple[float | None, object, set[bytes], object, tuple[int, int]]",
        tuple(await pipe.execute()),
    )
    if deadline is not None and (fields := pairs(present)):
        lease_left_s = (deadline - seconds * 1_000_000 - micros) / 1e6
        return _worker(worker, fields, lease_left_s=lease_left_s, tasks=tasks)
    fields = pairs(gone)
    return _worker(worker, fields) if fields else None


async def read_gaps(client: Redis, role: RoleName) -> list[str]:
    """Return the layers that the route of each accepting anchor lacks; "" if no layer is missing.
    `role`: role of the anchors.
    """
    pipe = client.pipeline(transaction=False)
    for worker in worker_ids(await client.zrange(keys.role_workers(role, "accepting"), 0, -1)):
        pipe.hget(keys.worker(worker), "gap")
    return texts(await pipe.execute())


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
    tasks: Set[bytes] = frozenset(),
) -> WorkerView:
    """Return the view of one worker or gateway. `fields`: hash of the process in Redis.
    `lease_left_s`: remaining seconds of its lease; None if the process is gone. `tasks`: request
    and stage of its tasks, as Redis stores them.
    """
    vitals = Vitals.decode(fields)
    hops = vitals.hops or LatencyCounts()
    owned = sorted(text(pair).partition("|") for pair in tasks)[:MAX_TASKS]
    held = msgspec.json.decode(fields.get("held") or b"[]", type=list[tuple[RequestId, StageName]])
    is_gone = lease_left_s is None
    state = text(fields.get("how")) or "left" if is_gone else _state(fields, lease_left_s)
    shown = {name: value for name in SHOWN if (value := getattr(vitals, name)) is not None}
    if is_gone:
        shown["running"] = 0
    return WorkerView(
        id=worker,
        state=state,
        ended_us=number(fields, "ended_us") if is_gone else 0,
        lease_left_s=round(lease_left_s or 0.0, 3),
        hop_p50_us=hops.percentile_us(50),
        hop_p95_us=hops.percentile_us(95),
        tasks=tuple(
            TaskRef(request=RequestId(request), stage=StageName(stage))
            for request, _, stage in owned
        ),
        held=tuple(TaskRef(request=request, stage=stage) for request, stage in held),
        transfer=_transfer(worker, fields, vitals),
        part=_part(fields, vitals),
        **{name: text(fields.get(name)) for name in TEXTS},
        **{name: number(fields, name) for name in NUMBERS},
        **shown,
    )


def drafts_of(stage: StageName, workers: Sequence[WorkerView]) -> tuple[WorkerDrafts, ...]:
    """Return the speculation statistics of each worker of a stage."""
    return tuple(
        WorkerDrafts(
            worker=view.id,
            acceptance_length=view.speculation.acceptance_length,
            figures=view.speculation,
        )
        for view in workers
        if view.role and stage_of(RoleName(view.role)) == stage and view.speculation is not None
    )


def _part(fields: Fields, vitals: Vitals) -> SpanPart | None:
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
        figures=vitals.span_figures or SpanFigures(),
    )


def _transfer(worker: WorkerId, fields: Fields, vitals: Vitals) -> WorkerTransfer | None:
    backend = text(fields.get("backend"))
    if not backend:
        return None
    pulls = (vitals.pulls or {}).values()
    return WorkerTransfer(
        worker=worker,
        role=text(fields.get("role")),
        backend=backend,
        registered_bytes=number(fields, "registered_bytes"),
        used_bytes=vitals.used_bytes or 0,
        slots_used=vitals.slots_used or 0,
        in_flight=sum(counts.in_flight for counts in pulls),
        num_pulls=sum(counts.num_pulls for counts in pulls),
        num_failed=sum(counts.num_failed for counts in pulls),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Totals over the listed workers: number of tasks by role, pull counts and sent chunks by edge,
    and chunk latencies.
    """

    running: Mapping[RoleName, int]
    pulls: Mapping[str, PullCounts]
    sent: Mapping[str, SentCounts]
    hops: LatencyCounts


async def read_load(client: Redis, *names: str) -> FleetLoad:
    """Return totals of the listed workers. `names`: fields of `Vitals` to read; the totals of other
    fields are empty or 0. Workers are read in slices, so that a large fleet does not occupy the
    event loop for long.
    """
    running: Counter[RoleName] = Counter()
    pulls: dict[str, PullCounts] = {}
    sent: dict[str, SentCounts] = {}
    hops = LatencyCounts()
    for workers in slices(worker_ids(await client.zrange(keys.WORKERS, 0, -1)), SLICE):
        pipe = client.pipeline(transaction=False)
        for worker in workers:
            pipe.hmget(keys.worker(worker), ("role", *names))
        for values in cast("list[list[bytes | None]]", await pipe.execute()):
            role, *statistics = (value or b"" for value in values)
            vitals = Vitals.decode(dict(zip(names, statistics, strict=True)))
            if role:
                running[RoleName(text(role))] += vitals.running or 0
            for edge, counts in (vitals.pulls or {}).items():
                pulls[edge] = pulls.get(edge, PullCounts()) + counts
            for edge, counts in (vitals.sent or {}).items():
                sent[edge] = sent.get(edge, SentCounts()) + counts
            if vitals.hops:
                hops += vitals.hops
    return FleetLoad(running=running, pulls=pulls, sent=sent, hops=hops)


def transfers_of(
    pulls: Mapping[str, PullCounts], bytes_per_s: Mapping[str, float]
) -> tuple[EdgeTransfer, ...]:
    return tuple(_edge(name, counts, bytes_per_s.get(name, 0.0)) for name, counts in pulls.items())


def _edge(name: str, counts: PullCounts, bytes_per_s: float) -> EdgeTransfer:
    return EdgeTransfer(
        edge=name,
        num_pulls=counts.num_pulls,
        num_bytes=counts.num_bytes,
        num_failed=counts.num_failed,
        in_flight=counts.in_flight,
        bytes_per_s=round(bytes_per_s, 1),
        p50_ms=_ms(counts.durations, 50),
        p95_ms=_ms(counts.durations, 95),
        durations=tuple(counts.durations.counts),
    )


def _ms(durations: LatencyCounts, percent: float) -> float | None:
    found = durations.percentile_ms(percent)
    return None if found is None else round(found, 3)
