"""The fleet's time series: counts of scripts and gateways in each step, read as points. Knows no
page.

Fields of a step: `submitted`, `ended:STATE`, `in:ROLE` and `out:ROLE` (granted, claimed),
`first:EDGE:BOUND`, `took:STAGE:BOUND`, `rtf:BOUND` and `underruns` are counts; `running:ROLE`,
`waiting:ROLE` and `pulled:EDGE` (bytes so far) were last seen by some gateway. A BOUND is an index
into `fleet.telemetry.counts.BOUNDS_US`; a real-time factor is counted as a duration in seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import pairs, text
from fleet.graphs import Graph
from fleet.telemetry.counts import LatencyCounts, bound_of
from fleet.telemetry.views import SERIES_KEPT_S, SERIES_STEP_S, SeriesPoint

Step = dict[str, int]
NUM_STEPS = SERIES_KEPT_S // SERIES_STEP_S
RATE_STEPS = 60 // SERIES_STEP_S
LATE_STEPS = 3
"""Number of steps for which a step may still change after its end: gateways write once per step."""


class Tally:
    """Counts of one gateway that are not yet written to the time series."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def rtf(self, rtf: float) -> None:
        self._counts[f"rtf:{bound_of(rtf * 1e6)}"] += 1

    def underruns(self, count: int) -> None:
        self._counts["underruns"] += count

    def take(self) -> dict[str, int]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def give_back(self, counts: Mapping[str, int]) -> None:
        """Add counts again that could not be written."""
        self._counts.update(counts)


class SeriesReader:
    """Reader of the last `SERIES_KEPT_S` seconds of the time series. Steps that can no longer
    change are cached, with their points: the points of an hour take 80 ms to compute.
    """

    def __init__(self, client: Redis, graph: Graph) -> None:
        self._client = client
        self._media = graph.media
        self._over: dict[int, Step] = {}
        self._points: dict[int, SeriesPoint] = {}

    async def read(self) -> list[tuple[int, Step]]:
        """Return (step number, fields) of all steps, oldest first, the present step last. Raises:
        redis-py's errors.
        """
        seconds, _ = await self._client.time()
        last = int(seconds) // SERIES_STEP_S
        steps = range(last - NUM_STEPS + 1, last + 1)
        wanted = [step for step in steps if step not in self._over]
        pipe = self._client.pipeline(transaction=False)
        for step in wanted:
            pipe.hgetall(keys.series(step))
        answers = cast("list[object]", await pipe.execute())
        fresh = {
            s: {n: int(text(v)) for n, v in pairs(raw).items()}
            for s, raw in zip(wanted, answers, strict=True)
        }
        every = self._over | fresh
        self._over = {step: every[step] for step in steps if step <= last - LATE_STEPS}
        return [(step, every[step]) for step in steps]

    async def points(self) -> list[SeriesPoint]:
        every = {
            step: self._points.get(step) or self._point(step, fields)
            for step, fields in await self.read()
        }
        self._points = {step: point for step, point in every.items() if step in self._over}
        return list(every.values())

    def _point(self, step: int, fields: Step) -> SeriesPoint:
        first = {medium: _counts(fields, f"first:{edge}") for edge, medium in self._media.items()}
        audio, text_ = first.get("audio", LatencyCounts()), first.get("text", LatencyCounts())
        took = {stage: _counts(fields, f"took:{stage}") for stage in _names(fields, "took")}
        rtf = _counts(fields, "rtf").percentile_us(95)
        return SeriesPoint(
            at_us=step * SERIES_STEP_S * 1_000_000,
            submitted=fields.get("submitted", 0),
            ended=_of(fields, "ended"),
            first_text_p50_ms=text_.percentile_ms(50),
            first_text_p95_ms=text_.percentile_ms(95),
            first_audio_p50_ms=audio.percentile_ms(50),
            first_audio_p95_ms=audio.percentile_ms(95),
            rtf_p95=None if rtf is None else rtf / 1e6,
            underruns=fields.get("underruns", 0),
            running=_of(fields, "running"),
            waiting=_of(fields, "waiting"),
            task_p50_ms=_percentiles(took, 50),
            task_p95_ms=_percentiles(took, 95),
        )


def rates_of(steps: Sequence[tuple[int, Step]], what: str) -> dict[str, float]:
    """Return counts per second by name, mean of the last minute. `what`: first part of the field
    names, such as `in`.
    """
    total: Counter[str] = Counter()
    for _, fields in steps[-RATE_STEPS:]:
        total.update(_of(fields, what))
    return {name: count / (RATE_STEPS * SERIES_STEP_S) for name, count in total.items()}


def growth_of(steps: Sequence[tuple[int, Step]], what: str) -> dict[str, float]:
    """Return the growth per second of running totals by name, over the last minute; 0 if a total
    shrank because workers left. `what`: first part of the field names, such as `pulled`.
    """
    seen: dict[str, list[tuple[int, int]]] = {}
    for step, fields in steps[-RATE_STEPS - 1 :]:
        for name, value in _of(fields, what).items():
            seen.setdefault(name, []).append((step, value))
    return {name: _growth(totals) for name, totals in seen.items()}


def _growth(totals: Sequence[tuple[int, int]]) -> float:
    (first, least), (last, most) = totals[0], totals[-1]
    return max(0, most - least) / ((last - first) * SERIES_STEP_S) if last > first else 0.0


def _of(fields: Step, what: str) -> dict[str, int]:
    return {
        name.removeprefix(f"{what}:"): value
        for name, value in fields.items()
        if name.startswith(f"{what}:")
    }


def _names(fields: Step, what: str) -> list[str]:
    return sorted({name.rpartition(":")[0] for name in _of(fields, what)})


def _counts(fields: Step, what: str) -> LatencyCounts:
    counts = LatencyCounts()
    for bound, number in _of(fields, what).items():
        counts.counts[int(bound)] += number
    return counts


def _percentiles(took: Mapping[str, LatencyCounts], percent: float) -> dict[str, float]:
    found = {stage: counts.percentile_ms(percent) for stage, counts in took.items()}
    return {stage: ms for stage, ms in found.items() if ms is not None}
