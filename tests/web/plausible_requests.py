"""Requests of a busy fake fleet: every state, a hand-off, a lost worker, and text that contains
HTML.
"""

from fleet.core.clock import now_us
from fleet.core.hand_off import HandOff
from fleet.core.ids import CLIENT, EdgeName, RequestId, StageName, WorkerId
from fleet.core.request import Sampling
from fleet.graphs import Graph
from fleet.telemetry.trace import (
    AudioIn,
    EdgeTrace,
    KVSpan,
    PlaybackReport,
    Receipt,
    RequestRow,
    RequestTrace,
    TaskBrief,
    TaskTrace,
    TraceEvent,
)
from tests.web.build import build, build_rows

HOSTILE = '<script>alert("x")</script>'
STATES = (
    *("finished", "finished", "finished", "running", "finished"),
    *("failed", "finished", "aborted", "submitted", "finished"),
)
TASK_STATES = {"running": "running", "submitted": "pending", "finished": "finished"}
KINDS = ("speech", "text", "voice", "transcription")


def request_id(number: int, start_us: int) -> RequestId:
    return RequestId(f"req-{start_us // 1000 + number * 1000:012x}{number:010x}")


def worker_id(role: str, number: int = 0) -> WorkerId:
    return WorkerId(f"{role}@machine:{4100 + number}:{number:06x}")


def build_row(number: int, start: int, stages: tuple[StageName, ...]) -> RequestRow:
    state, created = STATES[number % len(STATES)], start + number * 1_000_000
    is_over = state not in ("running", "submitted")
    failed, was_claimed = state == "failed", state != "submitted"
    states = [TASK_STATES.get(state, "aborted")] * len(stages)
    if failed:
        states[min(1, len(stages) - 1)] = "failed"
    return RequestRow(
        id=request_id(number, start),
        state=state,
        kind=KINDS[number % len(KINDS)],
        model="omni",
        created_us=created,
        ended_us=created + 700_000 + number * 11_000 if is_over else 0,
        code="engine_error" if failed else "",
        error=f"the engine failed the request: {HOSTILE}" if failed else "",
        session="5f0c" * 8 if number % 3 == 0 else "",
        tasks=tuple(
            TaskBrief(stage=stage, state=task, worker=worker_id(stage) if was_claimed else "")
            for stage, task in zip(stages, states, strict=True)
        ),
        first_us={EdgeName("text"): created + 90_000} if was_claimed else {},
    )


def build_trace(row: RequestRow, graph: Graph) -> RequestTrace:
    at, stages = row.created_us, [task.stage for task in row.tasks]
    shared = ("id", "state", "kind", "model", "code", "error", "created_us", "ended_us", "session")
    claimed = row.state != "submitted"
    return build(
        RequestTrace,
        **{name: getattr(row, name) for name in shared},
        graph=graph.name,
        now_us=now_us(),
        outputs=tuple(graph.media),
        params={"voice": "chelsie"},
        sampling={s: Sampling(temperature=0.7, max_tokens=300, seed=7) for s in stages},
        prompt_ids=tuple(range(30)),
        audio=(AudioIn(duration_s=2.4),),
        tasks=tuple(_build_task(n, row, graph) for n in range(len(stages))),
        edges=tuple(_build_edges(row, graph)),
        events=tuple(sorted(_build_events(row, stages), key=lambda event: event.at_us)),
        kv=tuple(_build_kv(row, stages[0])) if claimed else (),
        playback=PlaybackReport(played_samples=40_000, underruns=1, at_us=at + 900_000)
        if claimed
        else None,
    )


def _build_edges(row: RequestRow, graph: Graph) -> list[EdgeTrace]:
    at, last_us = row.created_us, (row.ended_us or row.created_us + 900_000) - 20_000
    return [
        EdgeTrace(
            name=edge.name,
            source=edge.source,
            target=edge.target,
            produced=20 - 3 * n,
            consumed=18 - 3 * n,
            items=48 * (n + 1),
            rows=48_000 if graph.media.get(edge.name) == "audio" else 48 * (n + 1),
            num_bytes=5_000 * (n + 1),
            remote_bytes=640_000 if edge.remote else 0,
            first_us=at + 60_000 * (n + 1),
            last_us=last_us,
            medium=graph.media.get(edge.name, ""),
        )
        for n, edge in enumerate(graph.edges)
    ]


def _build_task(number: int, row: RequestRow, graph: Graph) -> TaskTrace:
    brief, at = row.tasks[number], row.created_us
    if row.state == "submitted":
        return build(TaskTrace, stage=brief.stage, state=brief.state, role=brief.stage)
    first = at + 60_000 * (number + 1)
    times = zip(
        HandOff.__struct_fields__, (0, 400, 1_500, 2_000, 9_000, 9_900, 10_300), strict=True
    )
    receipt = Receipt(
        edge=next((edge.name for edge in graph.edges_to(brief.stage)), EdgeName("")),
        worker=brief.worker,
        num_chunks=20,
        first_us=first,
        last_us=first + 500_000,
        hop_mean_us=640,
        hop_max_us=2_900,
        num_pulls=3,
        pull_bytes=640_000,
        pull_us=5_400,
        pull_max_us=2_200,
    )
    return build(
        TaskTrace,
        stage=brief.stage,
        state=brief.state,
        role=brief.stage,
        owner=brief.worker,
        walk="decode",
        epoch=at + 1_000,
        granted_us=at + 800,
        claimed_us=at + 2_300,
        first_us=first,
        finished_us=row.ended_us - 30_000 if row.ended_us else 0,
        cached_rows=0 if number else 120,
        hand_off=None if number else HandOff(**{name: first + after for name, after in times}),
        receipts=(receipt,) if number else (),
    )


def _build_events(row: RequestRow, stages: list[StageName]) -> list[TraceEvent]:
    """Build the control-plane events of a request whose first stage loses its worker."""
    at, ended, lost = row.created_us, row.ended_us, stages[0]
    events = [TraceEvent(at_us=at, what="submitted", detail="30 prompt tokens")]
    if row.state == "submitted":
        return events
    granted, later, again = at + 800, at + 300_000, at + 300_900
    rows: list[tuple[object, ...]] = []
    for n, stage in enumerate(stages):
        rows += [
            (granted, "granted", stage, granted, "", ""),
            (at + 2_300, "claimed", stage, granted, worker_id(stage, 9), ""),
            (at + 60_000 * (n + 1), "output", stage, 0, worker_id(stage, 9), ""),
        ]
    rows += [
        (later, "lost", lost, later, worker_id(lost, 9), "died"),
        (again, "granted", lost, again, "", ""),
        (later + 2_000, "claimed", lost, again, worker_id(lost), ""),
    ]
    if ended:
        rows += [(ended - 30_000, "finished", s, 0, worker_id(s), "") for s in stages]
        rows += [
            (ended - 5_000, "delivered", CLIENT, 0, "", ""),
            (ended, "ended", "", 0, "", row.state),
        ]
    return events + build_rows(TraceEvent, "at_us what stage epoch worker detail", *rows)


def _build_kv(row: RequestRow, stage: StageName) -> list[KVSpan]:
    at = row.created_us
    return build_rows(
        KVSpan,
        "stage how worker from_us to_us",
        (stage, "computed", worker_id(stage, 9), at + 2_300, at + 300_000),
        (stage, "computed", worker_id(stage), at + 302_000, row.ended_us),
    )
