"""A request's story in Chrome's trace format, which Perfetto opens: a lane a stage, an edge, a KV owner. Pure.

Source: the "Trace Event Format" document of the Chromium project: complete events (X), instants (i), metadata (M); times in us.
"""

from collections.abc import Iterator, Sequence

import msgspec

from fleet.core.request_trace import EdgeTrace, RequestTrace, TaskTrace
from fleet.graphs import Graph
from web.fleet_api.walk_spans import EdgeLogs, find_walk_spans

PROCESS = 1


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Units: `ts` and `dur` microseconds."""

    name: str
    ph: str
    ts: int = 0
    dur: int | None = None
    pid: int = PROCESS
    tid: int = 0
    s: str | None = None
    args: dict[str, str | int] = {}


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    traceEvents: list[TraceEvent]
    displayTimeUnit: str = "ms"
    otherData: dict[str, str] = {}


def trace_of(story: RequestTrace, graph: Graph, logs: EdgeLogs) -> Trace:
    """Lanes in the order of the graph: the request itself, each stage, each edge, the walks of stages, then who owned which keys
    and values. `logs`: the chunks of edges, which say when walks began.
    """
    walks = {task.stage: found for task in story.tasks if (found := find_walk_spans(story, task, graph, logs))}
    lanes = ["request", *(task.stage for task in story.tasks), *(f"edge {edge.name}" for edge in story.edges)]
    lanes += [f"walks {stage}" for stage in walks]
    lanes += sorted({f"kv {span.stage}" for span in story.kv})
    number = {lane: place for place, lane in enumerate(lanes, start=1)}
    end = story.ended_us or story.now_us
    events = [TraceEvent(name="process_name", ph="M", args={"name": story.id})]
    events += [TraceEvent(name="thread_name", ph="M", tid=number[lane], args={"name": lane}) for lane in lanes]
    events.append(_span(story.state, story.created_us, end, number["request"], {"kind": story.kind, "model": story.model}))
    for task in story.tasks:
        events += _task_spans(task, end, number[task.stage])
    for edge in story.edges:
        events += _edge_spans(edge, number[f"edge {edge.name}"])
    for stage, spans in walks.items():
        lane = number[f"walks {stage}"]
        events += [_span(span.walk, span.from_us, span.to_us, lane, {"worker": span.worker}) for span in spans]
    for span in story.kv:
        events.append(_span(span.worker, span.from_us, span.to_us or end, number[f"kv {span.stage}"], {"how": span.how}))
    for mark in story.marks:
        lane = number.get(mark.stage, number["request"])
        args: dict[str, str | int] = {"worker": mark.worker, "epoch": mark.epoch, "detail": mark.detail}
        events.append(TraceEvent(name=mark.what, ph="i", ts=mark.at_us, tid=lane, s="t", args=args))
    return Trace(traceEvents=events, otherData={"request": story.id, "graph": story.graph, "state": story.state})


def _task_spans(task: TaskTrace, end: int, lane: int) -> Iterator[TraceEvent]:
    args: dict[str, str | int] = {"worker": task.owner, "epoch": task.epoch, "state": task.state}
    for name, begin, until in (
        ("queue", task.granted_us, task.claimed_us or end),
        ("to first output", task.claimed_us, task.first_us or task.finished_us or end),
        ("output", task.first_us, task.finished_us or end),
    ):
        if begin and until >= begin:
            yield _span(name, begin, until, lane, args)
    for receipt in task.receipts:
        counts: dict[str, str | int] = {
            "chunks": receipt.num_chunks, "hop mean us": receipt.hop_mean_us, "hop max us": receipt.hop_max_us,
            "pulls": receipt.num_pulls, "pulled bytes": receipt.pull_bytes, "pull us": receipt.pull_us,
        }  # fmt: skip
        yield TraceEvent(name=f"received {receipt.edge}", ph="i", ts=receipt.first_us, tid=lane, s="t", args=counts)


def _edge_spans(edge: EdgeTrace, lane: int) -> Sequence[TraceEvent]:
    if not edge.first_us:
        return ()
    args: dict[str, str | int] = {
        "chunks": edge.produced, "consumed": edge.consumed, "items": edge.items, "bytes": edge.num_bytes,
        "remote bytes": edge.remote_bytes,
    }  # fmt: skip
    return (_span(f"{edge.source} to {edge.target}", edge.first_us, edge.last_us, lane, args),)


def _span(name: str, begin: int, end: int, lane: int, args: dict[str, str | int]) -> TraceEvent:
    return TraceEvent(name=name, ph="X", ts=begin, dur=max(end - begin, 0), tid=lane, args=args)
