"""Conversion of a request's trace to Chrome's trace format, which Perfetto opens: a lane per stage,
edge and KV owner. Pure.

Source: the "Trace Event Format" document of the Chromium project: complete events (X), instants
(i), metadata (M); times in us.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from fleet.core.ids import StageName
from fleet.graphs import Graph
from fleet.telemetry.trace import EdgeTrace, RequestTrace, TaskTrace
from web.fleet_api.walk_spans import EdgeLogs, WalkSpan, find_walk_spans

PROCESS = 1


class ChromeTraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event in Chrome's trace format. `ph` is its kind, `tid` its lane. Units: `ts` and `dur` in
    microseconds.
    """

    name: str
    ph: str
    ts: int = 0
    dur: int | None = None
    pid: int = PROCESS
    tid: int = 0
    s: str | None = None
    args: dict[str, str | int] = {}


class ChromeTrace(msgspec.Struct, frozen=True, kw_only=True):
    traceEvents: list[ChromeTraceEvent]
    displayTimeUnit: str = "ms"
    otherData: dict[str, str] = {}


Arguments = dict[str, str | int]


def chrome_trace_of(trace: RequestTrace, graph: Graph, logs: EdgeLogs) -> ChromeTrace:
    """Convert a request's trace. Lanes in the order of the graph: the request, stages, edges, walks
    of stages, then KV owners.

    `logs` holds the stored chunks of each edge, from which the beginnings of walks are read.
    """
    walks = {
        task.stage: found
        for task in trace.tasks
        if (found := find_walk_spans(trace, task, graph, logs))
    }
    lanes = [
        "request",
        *(task.stage for task in trace.tasks),
        *(f"edge {edge.name}" for edge in trace.edges),
        *(f"walks {stage}" for stage in walks),
        *sorted({f"kv {span.stage}" for span in trace.kv}),
    ]
    number = {lane: place for place, lane in enumerate(lanes, start=1)}
    names = [
        ChromeTraceEvent(name="thread_name", ph="M", tid=number[lane], args={"name": lane})
        for lane in lanes
    ]
    return ChromeTrace(
        traceEvents=[
            ChromeTraceEvent(name="process_name", ph="M", args={"name": trace.id}),
            *names,
            *_events(trace, walks, number),
        ],
        otherData={"request": trace.id, "graph": trace.graph, "state": trace.state},
    )


def _events(
    trace: RequestTrace,
    walks: Mapping[StageName, Sequence[WalkSpan]],
    number: Mapping[str, int],
) -> Iterator[ChromeTraceEvent]:
    """Yield the events of a trace. `walks` are the walks of each stage; `number` maps names of
    lanes to their numbers.
    """
    end = trace.ended_us or trace.now_us
    kind: Arguments = {"kind": trace.kind, "model": trace.model}
    yield _span(trace.state, trace.created_us, end, number["request"], kind)
    for task in trace.tasks:
        yield from _task_events(task, end, number[task.stage])
    for edge in trace.edges:
        if edge.first_us:
            yield _edge_span(edge, number[f"edge {edge.name}"])
    for stage, spans in walks.items():
        for span in spans:
            lane = number[f"walks {stage}"]
            yield _span(span.walk, span.from_us, span.to_us, lane, {"worker": span.worker})
    for span in trace.kv:
        lane = number[f"kv {span.stage}"]
        yield _span(span.worker, span.from_us, span.to_us or end, lane, {"how": span.how})
    for event in trace.events:
        lane = number.get(event.stage, number["request"])
        args: Arguments = {"worker": event.worker, "epoch": event.epoch, "detail": event.detail}
        yield _instant(event.what, event.at_us, lane, args)


def _task_events(task: TaskTrace, end: int, lane: int) -> Iterator[ChromeTraceEvent]:
    args: Arguments = {"worker": task.owner, "epoch": task.epoch, "state": task.state}
    for name, begin, until in (
        ("queue", task.granted_us, task.claimed_us or end),
        ("to first output", task.claimed_us, task.first_us or task.finished_us or end),
        ("output", task.first_us, task.finished_us or end),
    ):
        if begin and until >= begin:
            yield _span(name, begin, until, lane, args)
    for receipt in task.receipts:
        counts: Arguments = {
            "chunks": receipt.num_chunks,
            "hop mean us": receipt.hop_mean_us,
            "hop max us": receipt.hop_max_us,
            "pulls": receipt.num_pulls,
            "pulled bytes": receipt.pull_bytes,
            "pull us": receipt.pull_us,
        }
        yield _instant(f"received {receipt.edge}", receipt.first_us, lane, counts)


def _edge_span(edge: EdgeTrace, lane: int) -> ChromeTraceEvent:
    args: Arguments = {
        "chunks": edge.produced,
        "consumed": edge.consumed,
        "items": edge.items,
        "bytes": edge.num_bytes,
        "remote bytes": edge.remote_bytes,
    }
    return _span(f"{edge.source} to {edge.target}", edge.first_us, edge.last_us, lane, args)


def _span(name: str, begin: int, end: int, lane: int, args: Arguments) -> ChromeTraceEvent:
    duration = max(end - begin, 0)
    return ChromeTraceEvent(name=name, ph="X", ts=begin, dur=duration, tid=lane, args=args)


def _instant(name: str, at_us: int, lane: int, args: Arguments) -> ChromeTraceEvent:
    return ChromeTraceEvent(name=name, ph="i", ts=at_us, tid=lane, s="t", args=args)
