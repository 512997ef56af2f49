"""A busy fake fleet for pages to show: workers in every state, queues, a dead letter, transfers,
time series, log lines and jobs.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from fleet.core.clock import now_us
from fleet.core.events import TaskClaimed, WorkerLeft
from fleet.core.ids import Epoch, RequestId, StageName, Walk
from fleet.core.jobs import BenchArguments
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.graphs import Graph
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import (
    SERIES_KEPT_S,
    SERIES_STEP_S,
    DeadLetterView,
    EdgeFlow,
    EdgeTransfer,
    FeedEntry,
    Job,
    JobProgress,
    LogLine,
    PendingGrant,
    RoleQueue,
    SeriesPoint,
    TaskRef,
    Transfers,
    WorkerTransfer,
    WorkerView,
)
from tests.web.build import build, build_rows, tensor_chunk
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_requests import HOSTILE, build_row, build_trace, request_id, worker_id

TRACE = "Traceback (most recent call last):\nValueError: no"
NUM_REQUESTS = 120
DRAFTED = SpeculationFigures(
    drafter="suffix", num_draws=1000, drafted=(900, 800, 700), accepted=(630, 400, 210)
)


def busy(graph: Graph) -> FakeTelemetry:
    """Return fake telemetry in which every list has entries, for the stages of `graph`."""
    now, start = now_us(), now_us() - NUM_REQUESTS * 1_000_000
    stages = tuple(stage.name for stage in graph.stages)
    fake = FakeTelemetry()
    fake.rows = [build_row(number, start, stages) for number in range(NUM_REQUESTS)]
    for row in fake.rows[-10:]:
        trace = fake.traces[row.id] = build_trace(row, graph)
        fake.edge_logs[trace.id, "text"] = [
            tensor_chunk(
                trace.id,
                "text",
                "ids",
                np.arange(5, 25, dtype="<i4"),
                producer_walk=Walk("decode"),
                produced_us=trace.edges[0].first_us,
            )
        ]
        sine = (8000 * np.sin(np.arange(48_000) * 2 * math.pi * 440 / 24_000)).astype("<i2")
        fake.edge_logs[trace.id, "audio"] = [tensor_chunk(trace.id, "audio", "pcm", sine)]
    running = [row.id for row in fake.rows if row.state == "running"]
    fake.worker_list = _workers(stages, now, running)
    fake.queue_list = [_queue(n, stage, fake.rows[-1 - n].id) for n, stage in enumerate(stages)]
    fake.letters = [
        DeadLetterView(
            id=request_id(3, start),
            stage=stages[0],
            why=f"3 workers died over it {HOSTILE}",
            died_us=now - 90_000_000,
            kind="text",
            num_prompt_tokens=23,
        )
    ]
    fake.transfer_view = _transfers(graph, stages)
    fake.points = [_point(n, now, stages) for n in range(SERIES_KEPT_S // SERIES_STEP_S)]
    fake.entries = incident(stages, now, fake.rows[-1].id)
    fake.lines = [_line(n, now, stages, fake.rows[-1 - n % 20].id) for n in range(300)]
    fake.dropped = 7
    fake.job_list = _jobs(now)
    claimed = TaskClaimed(
        request=fake.rows[-1].id, stage=stages[0], epoch=Epoch(1), owner=worker_id(stages[0])
    )
    left = WorkerLeft(worker=worker_id(stages[0], 9), how="died")
    fake.feed = [
        FeedEntry(id=f"{now // 1000 - 10 + n}-0", event=event)
        for n, event in enumerate((claimed, left))
    ]
    return fake


def incident(stages: tuple[StageName, ...], now: int, failed: RequestId) -> list[JournalEntry]:
    """Return the journal of two hours with an incident: the second stage died four times, answers
    were paused, one failed, requests were refused, and a worker was drained.
    """
    role = stages[1 % len(stages)]
    rows: list[tuple[float, str, Mapping[str, object]]] = [
        (2_400, "led", {"detail": "the conductor before it let its lease lapse"}),
    ]
    for number in range(4):
        worker: Mapping[str, object] = {"worker": worker_id(role, 30 + number), "role": role}
        ago = 500 - 90 * number
        task: Mapping[str, object] = {"request": request_id(number, now), "stage": role}
        rows += [
            (ago + 60 if number else 7_000, "joined", worker),
            (ago, "died", {**worker, "detail": "SIGKILL", "count": 2}),
            (ago, "lost", {**worker, **task}),
            (
                ago - 2,
                "recovered",
                {**task, "worker": worker_id(role, 40), "pause_us": 1_200_000 + 300_000 * number},
            ),
        ]
    drained: Mapping[str, object] = {"worker": worker_id(stages[-1], 5), "role": stages[-1]}
    rows += [
        (200, "ordered", {**drained, "detail": "drain", "by": "night-shift"}),
        (150, "refused", {"code": "overloaded", "count": 5}),
        (120, "failed", {"request": failed, "stage": role, "code": "worker_lost"}),
        (100, "failed", {"request": failed, "code": "engine_error", "detail": f"no {HOSTILE}"}),
    ]
    return [
        build(JournalEntry, id=f"{at // 1000}-{number}", at_us=at, what=what, **fields)
        for number, (at, what, fields) in enumerate(
            sorted(
                ((now - round(ago * 1e6), what, fields) for ago, what, fields in rows),
                key=lambda row: row[0],
            )
        )
    ]


def build_worker(role: str, number: int, name: str = "", /, **fields: object) -> WorkerView:
    """Build a worker view, on the machine of the fake fleet. `name`: replaces the role in the
    worker's id.
    """
    return build(
        WorkerView,
        id=worker_id(name or role, number),
        role=role,
        host="machine",
        pid=4100 + number,
        **fields,
    )


def _workers(stages: tuple[StageName, ...], now: int, running: list[RequestId]) -> list[WorkerView]:
    hour_ago = now - 3_600_000_000
    with_gpu = {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "gpu_total_bytes": 150 << 30,
        "gpu_used_bytes": 97 << 30,
        "gpu_own_bytes": 61 << 30,
        "gpu_percent": 88,
    }
    found = [
        build_worker(
            stage,
            n,
            state=("ready", "draining", "standby")[n % 3] if n >= len(stages) else "ready",
            started_us=hour_ago,
            lease_left_s=0.9,
            package="0.1.0",
            checkpoint="a1b2c3d4e5f60718",
            protocol="1",
            running=n % 4,
            capacity=16,
            memory_bytes=(312 + 40 * n) << 20,
            cpu_percent=35 + 9 * n,
            pages_used=300 + n,
            pages_total=1024,
            pages_kept=80,
            rows_reused=4000,
            slots_used=n,
            hop_p50_us=560,
            hop_p95_us=1_900,
            tasks=tuple(TaskRef(request=r, stage=stage) for r in running[:3]),
            transfer=_worker_transfer(stage, n),
            speculation=DRAFTED if stage == stages[0] else None,
            **(with_gpu if n == 1 else {"device": "cpu"}),
        )
        for n, stage in enumerate((*stages, *stages))
    ]
    gateway = build_worker(
        "",
        20,
        "gateway",
        state="ready",
        started_us=hour_ago,
        lease_left_s=1.0,
        running=5,
        capacity=64,
    )
    gone = build_worker(
        stages[0],
        9,
        state="died",
        started_us=now - 900_000_000,
        ended_us=now - 42_000_000,
        capacity=16,
    )
    return [*found, gateway, gone]


def _queue(number: int, stage: StageName, waiting: RequestId) -> RoleQueue:
    waits = {
        "queue_depth": 2,
        "lag": 1,
        "oldest_s": 1.7,
        "pending": tuple(
            build_rows(
                PendingGrant,
                "request stage epoch age_s alone read",
                (waiting, stage, 1, 1.7, False, False),
                (waiting, stage, 2, 0.2, True, True),
            )
        ),
    }
    return build(
        RoleQueue,
        role=stage,
        stage=stage,
        workers=0 if number == 2 else 1,
        draining=1,
        standby=1,
        running=7,
        capacity=16,
        in_per_s=4.2,
        out_per_s=4.1,
        wanted=1,
        managed=True,
        placed=1,
        **({} if number else waits),
    )


def _worker_transfer(role: str, number: int) -> WorkerTransfer:
    return WorkerTransfer(
        worker=worker_id(role, number),
        role=role,
        backend="nixl",
        registered_bytes=64 << 20,
        used_bytes=3 << 20,
        slots_used=number,
        in_flight=1,
        num_pulls=930,
        num_failed=2,
    )


def _transfers(graph: Graph, stages: tuple[StageName, ...]) -> Transfers:
    thought = EdgeTransfer(
        edge="thought",
        num_pulls=930,
        num_bytes=580 << 20,
        num_failed=2,
        in_flight=1,
        bytes_per_s=3.1e6,
        p50_ms=1.4,
        p95_ms=6.2,
        durations=tuple({23: 900, 36: 30}.get(at, 0) for at in range(101)),
    )
    flows = (
        EdgeFlow(
            edge=edge.name,
            source=edge.source,
            target=edge.target,
            chunks_per_s=8.2 * (number + 1),
            bytes_per_s=1.3e5 * 4**number,
            num_waiting=3 * (number == 1),
            num_parked=2 * (number == 1),
        )
        for number, edge in enumerate(graph.answer_edges)
    )
    return Transfers(
        flows=tuple(flows),
        edges=(thought, build(EdgeTransfer, edge="kv")),
        workers=tuple(_worker_transfer(stage, n) for n, stage in enumerate(stages)),
    )


def _point(number: int, now: int, stages: tuple[StageName, ...]) -> SeriesPoint:
    step_us = SERIES_STEP_S * 1_000_000
    count = SERIES_KEPT_S // SERIES_STEP_S
    wave = 1 + math.sin(number / 9)
    point = SeriesPoint(
        at_us=(now // step_us - count + 1 + number) * step_us,
        underruns=int(number % 25 == 0),
        running={stage: round(6 * wave) for stage in stages},
        waiting={stage: round(2 * wave) if stage == stages[0] else 0 for stage in stages},
        task_p50_ms=dict.fromkeys(stages, 240 * wave),
        task_p95_ms=dict.fromkeys(stages, 610 * wave),
    )
    if count - 140 < number < count - 134:
        return point
    return msgspec.structs.replace(
        point,
        submitted=round(12 * wave),
        ended={"finished": round(11 * wave), "failed": int(number % 30 == 0)},
        first_text_p50_ms=80 * wave + 40,
        first_text_p95_ms=160 * wave + 60,
        first_audio_p50_ms=210 * wave + 120,
        first_audio_p95_ms=420 * wave + 150,
        rtf_p95=0.4 + 0.2 * wave,
    )


def _line(number: int, now: int, stages: tuple[StageName, ...], request: RequestId) -> LogLine:
    at = now - (300 - number) * 400_000
    level = "error" if number % 40 == 0 else "warning" if number % 11 == 0 else "info"
    stage = stages[number % len(stages)]
    line = LogLine(
        id=f"{at // 1000}-{number}",
        at_us=at,
        level=level,
        logger="fleet.worker.loop.loop",
        process="worker",
        worker=worker_id(stage),
        message=f"line {number} of this worker",
        stage=stage,
        trace=TRACE if level == "error" else "",
    )
    if number % 3:
        return line
    message = f"request {request} continues {HOSTILE}"
    return msgspec.structs.replace(line, message=message, request=request)


def _jobs(now: int) -> list[Job]:
    reason = "RuntimeError: fleet bench ended with status 1"
    return [
        build(
            Job,
            id=f"job-{4 - number}",
            kind="bench",
            state=state,
            created_us=now - age_s * 1_000_000,
            **fields,
        )
        for number, (state, age_s, fields) in enumerate(
            (
                ("queued", 2, {"arguments": BenchArguments(measure="scale").as_json()}),
                (
                    "started",
                    60,
                    {
                        "arguments": BenchArguments(requests=20).as_json(),
                        "started_us": now - 50_000_000,
                        "progress": JobProgress(done=7, total=20, note="7 of 20 requests"),
                    },
                ),
                (
                    "failed",
                    900,
                    {
                        "started_us": now - 890_000_000,
                        "ended_us": now - 880_000_000,
                        "error": f"{reason} {HOSTILE}",
                        "traceback": "Traceback (most recent call last):\n"
                        f'  File "bench.py", line 3\n{reason}',
                    },
                ),
                (
                    "finished",
                    7_200,
                    {
                        "arguments": BenchArguments().as_json(),
                        "files": ("report.json", "report.png"),
                        "started_us": now - 7_199_000_000,
                        "ended_us": now - 7_000_000_000,
                        "result": '{"output":"p50 212 ms"}',
                    },
                ),
            )
        )
    ]
