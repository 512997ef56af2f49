"""Pauses of a stage: times without output that are far longer than usual for this stage. Pure.

Units: `*_us` are microseconds since 1970 or of a duration.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleet.telemetry.trace import RequestTrace, TraceEvent
from web.console.answer_facts import Arrival
from web.fleet_api.walk_spans import EdgeLogs

FACTOR, MIN_STALL_US = 4, 150_000
"""Least length of a pause: a multiple of the usual time of the chunk that ends the pause, and a
time in microseconds that is long enough to be felt.
"""
MIN_CHUNKS = 5
"""Least number of chunks that show what is usual; with fewer, no pauses are reported."""
NOT_AT_WORK = ("lost", "parked", "handed_off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A period without output. `usual_us` is the time in which the stage usually makes the chunk
    that ended it.
    """

    from_us: int
    to_us: int
    usual_us: float


def find_stalls(
    trace: RequestTrace, logs: EdgeLogs, arrivals: Sequence[Arrival]
) -> Mapping[str, Sequence[Stall]]:
    """Return the pauses of each stage, from the times of its chunks on the edge that has the most.

    `arrivals` are the chunks of sound, whose log the other edges' logs leave out.
    """
    made = {name: [(c.produced_us, c.num_rows) for c in log] for name, log in logs.items()}
    longest: dict[str, list[tuple[int, int]]] = {}
    for edge in trace.edges:
        chunks = made.get(edge.name, [])
        if edge.medium == "audio":
            chunks = [(arrival.at_us, arrival.samples) for arrival in arrivals]
        if len(chunks) > len(longest.get(edge.source, ())):
            longest[edge.source] = chunks
    return {
        stage: tuple(_stalls_of(chunks, [e for e in trace.events if e.stage == stage]))
        for stage, chunks in longest.items()
        if len(chunks) >= MIN_CHUNKS
    }


def _stalls_of(chunks: Sequence[tuple[int, int]], events: Sequence[TraceEvent]) -> Iterator[Stall]:
    """Yield the pauses between chunks, each (time, rows). A chunk of many rows takes their time, so
    times are compared by row. Pauses in which no worker had the task are left out.
    """
    gaps = [(a, b, max(rows, 1)) for (a, _), (b, rows) in pairwise(chunks) if b > a]
    usual_us = statistics.median((b - a) / rows for a, b, rows in gaps) if gaps else 0.0
    for from_us, to_us, rows in gaps:
        if to_us - from_us < max(FACTOR * usual_us * rows, MIN_STALL_US):
            continue
        away = any(e.what in NOT_AT_WORK and from_us <= e.at_us <= to_us for e in events)
        if not away:
            yield Stall(from_us=from_us, to_us=to_us, usual_us=usual_us * rows)
