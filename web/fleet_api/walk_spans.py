"""Times of the walks of a request's tasks, from the markers of its chunks and the events of its
trace. Pure.

Walks belong to the request: a worker that claims a task again replays earlier walks, which count as
part of the walk that the task had reached. Knows no stage by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.core.chunk import Chunk
from fleet.graphs import Graph
from fleet.telemetry.trace import RequestTrace, TaskTrace, TraceEvent

EdgeLogs = Mapping[str, Sequence[Chunk]]
"""The stored chunks of each edge, by its name."""
RELEASED = ("lost", "parked", "failed", "handed_off", "finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkSpan:
    """A period in which a worker worked on one walk of a task. A walk that begins with a chunk
    begins when the chunk was produced. Units: microseconds since 1970.
    """

    walk: str
    worker: str
    from_us: int
    to_us: int


def find_walk_spans(
    trace: RequestTrace, task: TaskTrace, graph: Graph, logs: EdgeLogs
) -> tuple[WalkSpan, ...]:
    """Return the walks of a task in order, divided by the workers that owned the task; empty for a
    stage with only one walk.
    """
    stage = next((stage for stage in graph.stages if stage.name == task.stage), None)
    if stage is None or len(stage.walks) < 2:
        return ()
    begins = [(0, str(stage.walks[0])), *_transitions(task, graph, logs)]
    ends = [at for at, _ in begins[1:]] + [trace.ended_us or trace.now_us]
    spans: list[WalkSpan] = []
    for worker, from_us, to_us in _find_owners(
        task, [event for event in trace.events if event.stage == task.stage], ends[-1]
    ):
        for (begin, walk), end in zip(begins, ends, strict=True):
            first, last = max(begin, from_us), min(end, to_us)
            if first < last:
                spans.append(WalkSpan(walk=walk, worker=worker, from_us=first, to_us=last))
    return tuple(spans)


def _transitions(task: TaskTrace, graph: Graph, logs: EdgeLogs) -> list[tuple[int, str]]:
    """Return (time, walk) of each walk after the first: from the markers of a task's input chunks,
    or for a task without inputs from its first output in each walk.
    """
    inputs = graph.edges_to(task.stage)
    if inputs:
        times = [
            (
                chunk.produced_us,
                chunk.walk or edge.consumer_walk(chunk.producer_walk, chunk.ordinal),
            )
            for edge in inputs
            for chunk in logs.get(edge.name, ())
            if chunk.boundary and chunk.producer_walk is not None
        ]
    else:
        times = [
            (c.produced_us, c.producer_walk)
            for edge in graph.edges_from(task.stage)
            for c in logs.get(edge.name, ())
        ]
    order = {str(walk): index for index, walk in enumerate(graph.stage(task.stage).walks)}
    last = 0
    changes: list[tuple[int, str]] = []
    for at, walk in sorted((at, str(walk)) for at, walk in times if at and walk):
        if order.get(walk, 0) > last:
            changes.append((at, walk))
            last = order[walk]
    return changes


def _find_owners(
    task: TaskTrace, events: Sequence[TraceEvent], end_us: int
) -> list[tuple[str, int, int]]:
    """Return (worker, begin, end) of each period in which a worker owned the task."""
    owners: list[tuple[str, int, int]] = []
    worker, since = "", 0
    for event in events:
        if event.what == "claimed":
            worker, since = event.worker, event.at_us
        elif event.what in RELEASED and since:
            owners.append((worker, since, event.at_us))
            since = 0
    if since:
        owners.append((worker, since, end_us))
    if not events and task.claimed_us:
        owners.append((task.owner, task.claimed_us, task.finished_us or end_us))
    return owners
