"""Which walk each task of a request was in, from when until when: from its chunks' markers and its story's marks. Pure.

The walks are the request's own: a worker that takes a task over replays what went before within the walk that it had reached.
Knows no stage by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.core.chunk import Chunk
from fleet.core.request_trace import RequestTrace, TaskTrace, TraceEvent
from fleet.graphs import Graph

EdgeLogs = Mapping[str, Sequence[Chunk]]
"""By edge, its chunks as far as they are kept."""
LEFT = ("lost", "failed", "handed_off", "finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkSpan:
    """Units: microseconds since 1970. A walk that begins with a chunk does so when its producer had made it."""

    walk: str
    worker: str
    from_us: int
    to_us: int


def find_walk_spans(story: RequestTrace, task: TaskTrace, graph: Graph, logs: EdgeLogs) -> tuple[WalkSpan, ...]:
    """In order, while some worker had the task; nothing of a stage that has one walk only."""
    stage = next((stage for stage in graph.stages if stage.name == task.stage), None)
    if stage is None or len(stage.walks) < 2:
        return ()
    begins = [(0, str(stage.walks[0])), *_transitions(task, graph, logs)]
    ends = [at for at, _ in begins[1:]] + [story.ended_us or story.now_us]
    spans: list[WalkSpan] = []
    for worker, from_us, to_us in _held(task, [mark for mark in story.marks if mark.stage == task.stage], ends[-1]):
        for (begin, walk), end in zip(begins, ends, strict=True):
            first, last = max(begin, from_us), min(end, to_us)
            if first < last:
                spans.append(WalkSpan(walk=walk, worker=worker, from_us=first, to_us=last))
    return tuple(spans)


def _transitions(task: TaskTrace, graph: Graph, logs: EdgeLogs) -> list[tuple[int, str]]:
    """When the task came into a later walk than the one before: by the markers of its inputs; of a task without inputs, when it
    first made something in that walk.
    """
    inputs = graph.edges_to(task.stage)
    if inputs:
        told = [
            (chunk.made_us, chunk.walk or edge.consumer_walk(chunk.producer_walk, chunk.ordinal))
            for edge in inputs
            for chunk in logs.get(edge.name, ())
            if chunk.boundary and chunk.producer_walk is not None
        ]
    else:
        told = [(c.made_us, c.producer_walk) for edge in graph.edges_from(task.stage) for c in logs.get(edge.name, ())]
    order = {str(walk): place for place, walk in enumerate(graph.stage(task.stage).walks)}
    known = 0
    changes: list[tuple[int, str]] = []
    for at, walk in sorted((at, str(walk)) for at, walk in told if at and walk):
        if order.get(walk, 0) > known:
            changes.append((at, walk))
            known = order[walk]
    return changes


def _held(task: TaskTrace, marks: Sequence[TraceEvent], end_us: int) -> list[tuple[str, int, int]]:
    """Who had the task, from when until when."""
    held: list[tuple[str, int, int]] = []
    worker, since = "", 0
    for mark in marks:
        if mark.what == "claimed":
            worker, since = mark.worker, mark.at_us
        elif mark.what in LEFT and since:
            held.append((worker, since, mark.at_us))
            since = 0
    if since:
        held.append((worker, since, end_us))
    if not marks and task.claimed_us:
        held.append((task.owner, task.claimed_us, task.finished_us or end_us))
    return held
