"""The fleet's time series: what scripts and gateways counted in each step, read back as points. Knows no page.

Fields of a step: `submitted`, `ended:STATE`, `in:ROLE` and `out:ROLE` (granted, claimed), `first:EDGE:BOUND`, `took:STAGE:BOUND`,
`rtf:BOUND` and `underruns` are counts; `running:ROLE`, `waiting:ROLE` and `pulled:EDGE` (bytes so far) were seen by some gateway.
A BOUND is a place in `fleet.core.hops.BOUNDS_US`; an RTF is counted as that many seconds.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import redis.asyncio

from fleet.control import keys
from fleet.control.connect import pairs, text
from fleet.core.hops import BOUNDS_US, HopCounts
from fleet.core.telemetry import SERIES_KEPT_S, SERIES_STEP_S, SeriesPoint
from fleet.graphs import Graph

Step = dict[str, int]
NUM_STEPS = SERIES_KEPT_S // SERIES_STEP_S
RATE_STEPS = 60 // SERIES_STEP_S
LATE_STEPS = 3
"""A step may still be told of so long after its end: gateways tell once a step."""


def bound_of(us: float) -> int:
    """The place of a duration among the bounds."""
    return min(bisect_left(BOUNDS_US, us), len(BOUNDS_US) - 1)


class Tally:
    """What one gateway counted and has not told yet."""

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
        """They could not be told."""
        self._counts.update(counts)


class SeriesReader:
    """Reads the steps of the last quarter of an hour; those that are over are remembered."""

    def __init__(self, client: redis.asyncio.Redis, graph: Graph) -> None:
        self._client, self._media = client, graph.media
        self._over: dict[int, Step] = {}

    async def read(self) -> list[tuple[int, Step]]:
        """(step, its fields), the oldest first, the current one last. Raises: redis's errors."""
        seconds, _ = await self._client.time()
        last = int(seconds) // SERIES_STEP_S
        steps = range(last - NUM_STEPS + 1, last + 1)
        wanted = [step for step in steps if step not in self._over]
        pipe = self._client.pipeline(transaction=False)
        for step in wanted:
            pipe.hgetall(keys.series(step))
        answers = cast("list[object]", await pipe.execute())
        fresh = {s: {n: int(text(v)) for n, v in pairs(raw).items()} for s, raw in zip(wanted, answers, strict=True)}
        known = self._over | fresh
        self._over = {step: known[step] for step in steps if step <= last - LATE_STEPS}
        return [(step, known[step]) for step in steps]

    async def points(self) -> list[SeriesPoint]:
        return [self._point(step, fields) for step, fields in await self.read()]

    def _point(self, step: int, fields: Step) -> SeriesPoint:
        first = {medium: _counts(fields, f"first:{edge}") for edge, medium in self._media.items()}
        sound, words = first.get("audio", HopCounts()), first.get("text", HopCounts())
        took = {stage: _counts(fields, f"took:{stage}") for stage in _names(fields, "took")}
        rtf = _counts(fields, "rtf").percentile_us(95)
        return SeriesPoint(
            at_us=step * SERIES_STEP_S * 1_000_000,
            submitted=fields.get("submitted", 0),
            ended=_of(fields, "ended"),
            first_text_p50_ms=_ms(words, 50),
            first_text_p95_ms=_ms(words, 95),
            first_audio_p50_ms=_ms(sound, 50),
            first_audio_p95_ms=_ms(sound, 95),
            rtf_p95=None if rtf is None else rtf / 1e6,
            underruns=fields.get("underruns", 0),
            running=_of(fields, "running"),
            waiting=_of(fields, "waiting"),
            task_p50_ms={stage: ms for stage, counts in took.items() if (ms := _ms(counts, 50)) is not None},
            task_p95_ms={stage: ms for stage, counts in took.items() if (ms := _ms(counts, 95)) is not None},
        )


def rates_of(steps: Sequence[tuple[int, Step]], what: str) -> dict[str, float]:
    """Counts a second by name, over the last minute."""
    total: Counter[str] = Counter()
    for _, fields in steps[-RATE_STEPS:]:
        total.update(_of(fields, what))
    return {name: count / (RATE_STEPS * SERIES_STEP_S) for name, count in total.items()}


def growth_of(steps: Sequence[tuple[int, Step]], what: str) -> dict[str, float]:
    """How fast a running total grew by name, over the last minute; 0 where workers left with what they had counted."""
    seen: dict[str, list[tuple[int, int]]] = {}
    for step, fields in steps[-RATE_STEPS - 1 :]:
        for name, value in _of(fields, what).items():
            seen.setdefault(name, []).append((step, value))
    return {name: _growth(told) for name, told in seen.items()}


def _growth(told: Sequence[tuple[int, int]]) -> float:
    (first, least), (last, most) = told[0], told[-1]
    return max(0, most - least) / ((last - first) * SERIES_STEP_S) if last > first else 0.0


def _of(fields: Step, what: str) -> dict[str, int]:
    return {name.removeprefix(f"{what}:"): value for name, value in fields.items() if name.startswith(f"{what}:")}


def _names(fields: Step, what: str) -> list[str]:
    return sorted({name.rpartition(":")[0] for name in _of(fields, what)})


def _counts(fields: Step, what: str) -> HopCounts:
    counts = HopCounts()
    for bound, number in _of(fields, what).items():
        counts.counts[int(bound)] += number
    return counts


def _ms(counts: HopCounts, percent: float) -> float | None:
    found = counts.percentile_us(percent)
    return None if found is None else found / 1000
