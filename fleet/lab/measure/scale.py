"""Scale benchmark of the control plane: many real-time streams on the fake engine, and a second
worker that joins a full role.

Every stage produces one row (an item of its output) per stream every 80 ms, the length of a frame
of speech, which is real time: 12.5 rows a second. Streams have different phases. A chunk on any of
the E edges of an answer carries E rows, hence a stream appends 12.5 chunks a second on all its
edges together, half of them (where E is 4) between workers and half to the client. The engine
computes nothing: all CPU used is the fleet's.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fleet.config import FleetConfig
from fleet.config.schema import EdgeConfig, PolicyConfig
from fleet.control.client import FleetClient
from fleet.core.ids import new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import (
    BenchOptions,
    Context,
    Measurement,
    argument,
    whole_number,
)
from fleet.lab.measure.scale_costs import measure_costs
from fleet.lab.measure.scale_expected import expected_content
from fleet.lab.measure.scale_fleet import ScaleFleet, scale_fleet
from fleet.lab.measure.scale_load import StreamLoad, spread_s
from fleet.lab.measure.scale_result import Joined, ScalePhase, ScaleResult
from fleet.process.gc_freeze import freeze_gc

STREAMS = (10, 300)
STEP_MS = 80
STEP_KEY = "step_ms"
PROMPT_IDS = tuple(range(16))
READY_S = 180.0
POLL_S = 0.1
SETTLE_S = 1.0
"""Time from the first chunk of the last stream to the start of the measured window, in which the
later stages of the last stream begin to produce chunks.
"""
SLACK_S = 4.0
"""Smallest time by which streams last longer than needed. If the workers took longer to start, as
on a busy machine, the start time is used instead.
"""
OTHER_CONTENT = "its content differs from the expected one"
JOIN_S = 5.0
"""Smallest time allowed for the second worker to start and its streams to begin. Twice the start
time of the first workers is used if longer.
"""


def measure_scale(context: Context) -> ScaleResult:
    """Measure each number of streams on one fleet; then, on another fleet, a second worker that
    joins a role with slots for half of the streams; then costs without workers.

    Each window lasts `--scale-seconds`, and at least two leases, since workers report the ages of
    chunks once per lease.
    Raises: BenchError if a process or a stream fails; ConfigError if there is no Redis to start.
    """
    base, counts = context.resolve(), counts_of(context.options)
    most = max(counts)
    seconds = max(context.options.scale_seconds, math.ceil(2 * base.lease.worker_ttl_s))
    step = context.steps("streams", len(counts) + 2)
    freeze_gc()
    phases: list[ScalePhase] = []
    with scale_fleet(paced(base, most)) as fleet:
        for count in counts:
            phases.append(asyncio.run(_phase(fleet, count, seconds)))
            step()
    role, slots = base.roles()[0], math.ceil(most / 2)
    with scale_fleet(_with_slots(paced(base, most), role.stage, slots)) as fleet:
        joined = asyncio.run(_join(fleet, role.name, most, slots, seconds))
        step()
    costs = measure_costs(base, most)
    step()
    graph = base.graph_declaration()
    return ScaleResult(
        graph=graph.name,
        step_ms=STEP_MS,
        num_edges=len(graph.answer_edges),
        phases=tuple(phases),
        joined=joined,
        costs=costs,
    )


def counts_of(options: BenchOptions) -> list[int]:
    """Return the numbers of streams to measure, in ascending order."""
    return sorted(set(options.streams or STREAMS))


def paced(base: FleetConfig, streams: int, *, step_ms: int = STEP_MS) -> FleetConfig:
    """Return `base` with the fake engine, slots for `streams` streams, and the pace described in
    the module's docstring.
    """
    graph = base.graph_declaration()
    policy = PolicyConfig(
        kind="ramp", ramp=(len(graph.answer_edges),), low_buffer_s=0.0, busy_first_chunk_factor=1
    )
    stages = {
        stage.name: base.stage(stage.name).model_copy(
            update={"max_batch": streams, "replicas": 1, "standby": 0, "extra": {STEP_KEY: step_ms}}
        )
        for stage in graph.stages
    }
    edges = {
        edge.name: base.edges.get(edge.name, EdgeConfig()).model_copy(update={"policy": policy})
        for edge in graph.answer_edges
    }
    limits = base.limits.model_copy(update={"max_requests": streams})
    # Rows of the fake engine are sent in their headers with any kind; this kind opens no NIXL
    # agent.
    transfer = base.transfer.model_copy(update={"kind": "redis"})
    changes = {
        "engine": "fake",
        "device": "cpu",
        "async_chunk": True,
        "stages": stages,
        "edges": edges,
    }
    changes |= {"limits": limits, "transfer": transfer}
    return base.model_copy(update=changes)


def _with_slots(config: FleetConfig, stage: str, slots: int) -> FleetConfig:
    return config.model_copy(
        update={
            "stages": {
                **config.stages,
                stage: config.stages[stage].model_copy(update={"max_batch": slots}),
            }
        }
    )


def specs_of(config: FleetConfig, count: int, seconds: float) -> list[RequestSpec]:
    """Return `count` requests, each with its own content, whose answers last for `seconds` at the
    pace of real time.
    """
    graph = config.graph_declaration()
    rows = math.ceil(seconds * 1000 / STEP_MS)
    return [
        RequestSpec(
            id=new_request_id(),
            graph=graph.name,
            prompt_ids=PROMPT_IDS,
            outputs=tuple(graph.media),
            sampling={stage.name: Sampling(max_tokens=rows, seed=seed) for stage in graph.stages},
        )
        for seed in range(count)
    ]


@asynccontextmanager
async def _streams(
    fleet: ScaleFleet, count: int, seconds: Callable[[], float]
) -> AsyncIterator[StreamLoad]:
    """Wait until the fleet is ready, and open `count` streams that last at least `seconds()` after
    the last stream has begun. Yield their load, and receive the streams to their end.
    """
    client = await _ready_client(fleet)
    load = StreamLoad(
        fleet,
        client,
        specs_of(fleet.config, count, spread_s(count) + seconds() + max(SLACK_S, fleet.ready_s)),
    )
    try:
        await load.open()
        yield load
        await load.finish()
    finally:
        await load.close()
        await client.stop()


async def _phase(fleet: ScaleFleet, count: int, seconds: int) -> ScalePhase:
    async with _streams(fleet, count, lambda: SETTLE_S + seconds) as load:
        await load.wait_for(lambda: load.num_begun() == count, "the first chunk of every stream")
        await asyncio.sleep(SETTLE_S)
        window = await load.window(seconds)
    return ScalePhase(streams=count, window=window, broken=_broken(fleet.config, load))


async def _join(fleet: ScaleFleet, role: str, count: int, slots: int, seconds: int) -> Joined:
    async with _streams(
        fleet, count, lambda: max(JOIN_S, 2 * fleet.ready_s) + 2 * (SETTLE_S + seconds)
    ) as load:
        await load.wait_for(
            lambda: load.num_begun() == min(slots, count),
            "the first chunk of every stream with a slot",
        )
        await asyncio.sleep(SETTLE_S)
        alone = await load.window(seconds)
        began_s = time.monotonic()
        fleet.start_worker(role)
        await load.wait_for(
            lambda: load.num_begun() == count, "the first chunk of the queued streams"
        )
        start_s = time.monotonic() - began_s
        await asyncio.sleep(SETTLE_S)
        together = await load.window(seconds)
    return Joined(
        role=role,
        slots=slots,
        streams=count,
        alone=alone,
        together=together,
        start_s=start_s,
        broken=_broken(fleet.config, load),
    )


async def _ready_client(fleet: ScaleFleet) -> FleetClient:
    """Register as a gateway, and wait until every role is served."""
    client = await FleetClient.connect(fleet.url, fleet.config)
    await client.start()
    deadline = time.monotonic() + READY_S
    while missing := await client.telemetry.missing_roles():
        fleet.check()
        if time.monotonic() > deadline:
            raise BenchError(
                f"scale: no worker serves {', '.join(missing)} after {READY_S:g} s; use a "
                "quieter machine"
            )
        await asyncio.sleep(POLL_S)
    fleet.set_ready()
    return client


def _broken(config: FleetConfig, load: StreamLoad) -> tuple[str, ...]:
    """Return a fault for each stream that is incomplete, or whose content differs from the expected
    content.
    """
    expected = expected_content(
        paced(config, len(load.streams), step_ms=0), [stream.spec for stream in load.streams]
    )
    faults = (
        (s.spec.id, s.fault or ("" if s.content() == expected[s.spec.id] else OTHER_CONTENT))
        for s in load.streams
    )
    return tuple(f"{request}: {fault}" for request, fault in faults if fault)


def _counts(text: str) -> list[int]:
    return [whole_number()(part) for part in text.split(",")]


MEASUREMENT = Measurement(
    place=30,
    key="scale",
    run=measure_scale,
    option="--scale",
    help="load the control plane alone, on the fake engine",
    about={
        "--scale": "real-time streams on the fake engine, 12.5 chunks a second each, on a fleet "
        "started for it: how late chunks arrive, and the CPU per chunk, for each count of "
        "--streams; then a role with slots for half of the streams, and a second worker that joins "
        "it. Every answer is compared with the expected one. Then without workers: the CPU of "
        "Redis and its append-only file per chunk; how soon "
        "3,000 answers move; a turn of the conductor with 15,000 waiting grants; fewer with less "
        "than 300 streams"
    },
    arguments=(
        argument(
            "--streams",
            type=_counts,
            action="extend",
            metavar="N,N",
            help="concurrent streams; repeatable (10,300)",
        ),
        argument(
            "--scale-seconds",
            type=whole_number(),
            default=10,
            metavar="S",
            help="length of each measured window (10)",
        ),
    ),
)
