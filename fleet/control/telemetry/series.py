"""The fleet's time series: counts of scripts and gateways in each step, read as points. Knows no
page.

Fields of a step: `submitted`, `ended:STATE`, `in:ROLE` and `out:ROLE` (granted, claimed),
`first:EDGE:BOUND`, `took:STAGE:BOUND`, `rtf:BOUND` and `underruns` are counts; `running:ROLE`,
`waiting:ROLE` and, as totals so far, `pulled:EDGE` (bytes), `chunks:EDGE` and `bytes:EDGE` were
last seen by some gateway. A BOUND is an index into `fleet.telemetry.counts.BOUNDS_US`; a real-time
factor is counted as a duration in seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import pairs, slices, text
from fleet.core.ids import RequestId
from fleet.graphs import Graph
from fleet.telemetry.counts import LatencyCounts, bound_of
from fleet.telemetry.views import SERIES_KEPT_S, SERIES_STEP_S, SeriesPoint

Step = dict[str, int]
NUM_STEPS = SERIES_KEPT_S // SERIES_STEP_S
RATE_STEPS = 60 // SERIES_STEP_S
GROWTH_STEPS = RATE_STEPS + 1
"""Number of the last steps that `rates_of` and `growth_of` read."""
SLICE = 180
"""Number of steps that are read in one round trip."""
LATE_STEPS = 3
"""Number of steps for which a step may still change after its end: gateways write once per step."""


MAX_NAMED_REFUSALS = 100
"""Number of refused requests whose ids are written in one step, for one error code."""
NO_REQUEST = RequestId("")


class RefusedRequests(NamedTuple):
    """Refused requests of one error code: the last error's message, and the ids of the latest."""

    message: str = ""
    requests: tuple[RequestId, ...] = ()

    def then(self, later: "RefusedRequests") -> "RefusedRequests":
        requests = (*self.requests, *later.requests)[-MAX_NAMED_REFUSALS:]
        return RefusedRequests(later.message or self.message, requests)

    @property
    def value(self) -> str:
        """Ids and message as `scripts.record_metrics` takes them: `ID,ID|MESSAGE`."""
        return f"{','.join(self.requests)}|{self.message}"


class Tally:
    """Counts of one gateway that are not yet written to the time series."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, RefusedRequests] = {}
        """The latest refused requests by the name of their count."""

    def rtf(self, rtf: float) -> None:
        self._counts[f"rtf:{bound_of(rtf * 1e6)}"] += 1

    def underruns(self, count: int) -> None:
        self._counts["underruns"] += count

    def refusal(
        self, code: str, limit: str = "", request: RequestId = NO_REQUEST, message: str = ""
    ) -> None:
        """Count a request that was not admitted. `code`, `message`: code and message of the error.
        `limit`: name of the limit that the request's API key has reached; "" for other refusals.
        `request`: id of the request; "" for a voice session.
        """
        name = f"refused:{code}:{limit}" if limit else f"refused:{code}"
        self._counts[name] += 1
        before = self._refused.get(name, RefusedRequests())
        self._refused[name] = before.then(RefusedRequests(message, (request,) if request else ()))

    def take_refused(self) -> dict[str, RefusedRequests]:
        """Return the refused requests since the last call, by the name of their count."""
        refused, self._refused = self._refused, {}
        return refused

    def take(self) -> dict[str, int]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def give_back(self, counts: Mapping[str, int], refused: Mapping[str, RefusedRequests]) -> None:
        """Add counts and refused requests again that could not be written."""
        self._counts.update(counts)
        for name, earlier in refused.items():
            self._refused[name] = earlier.then(self._refused.get(name, RefusedRequests()))


class SeriesReader:
    """Reader of the last `SERIES_KEPT_S` seconds of the time series. Steps that can no longer
    change, and their points, are cached.
    """

    def __init__(self, client: Redis, graph: Graph) -> None:
        self._client = client
        self._media = graph.media
        self._over: dict[int, Step] = {}
        self._points: dict[int, SeriesPoint] = {}

    async def read(self, num_steps: int = NUM_STEPS) -> list[tuple[int, Step]]:
        """Return (step number, fields) of the last `num_steps` steps, oldest first, the present
        step last. Raises: redis-py's errors.
        """
        seconds, _ = await self._client.time()
        last = int(seconds) // SERIES_STEP_S
        steps = range(last - num_steps + 1, last + 1)
        every = dict(self._over)
        for wanted in slices([step for step in steps if step not in every], SLICE):
            pipe = self._client.pipeline(transaction=False)
            for step in wanted:
                pipe.hgetall(keys.series(step))
            answers = cast("list[object]", await pipe.execute())
            for step, raw in zip(wanted, answers, strict=True):
                every[step] = {n: int(text(v)) for n, v in pairs(raw).items()}
        kept = range(last - NUM_STEPS + 1, last - LATE_STEPS + 1)
        self._over = {step: fields for step, fields in every.items() if step in kept}
        return [(step, every[step]) for step in steps]

    async def points(self) -> list[SeriesPoint]:
        steps = await self.read()
        points = {
            step: self._points.get(step) or self._point(step, fields) for step, fields in steps
        }
        self._points = {step: points[step] for step in points if step in self._over}
        return list(points.values())

    def _point(self, step: int, fields: Step) -> SeriesPoint:
        first = {medium: _counts(fields, f"first:{edge}") for edge, medium in self._media.items()}
        audio, text_ = first.get("audio", LatencyCounts()), first.get("text", LatencyCounts())
        took = {stage: _counts(fields, f"took:{stage}") for stage in _names(fields, "took")}
        rtf = _counts(fields, "rtf").percentile_us(95)
        return SeriesPoint(
            at_us=step * SERIES_STEP_S * 1_000_000,
            submitted=fields.get("submitted", 0),
            ended=_of(fields, "ended"),
            refused=_of(fields, "refused"),
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
    for step, fields in steps[-GROWTH_STEPS:]:
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
