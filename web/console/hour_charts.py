"""The four charts of the last hour, or of a past time: their lines, the columns of numbers that the
browser draws, and the present numbers as text. Knows no page and no colour.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fleet.core.ids import stage_of
from fleet.telemetry.views import SERIES_STEP_S, SeriesPoint
from web.console import formats
from web.console.charts import find_last, find_top

RECENT_STEPS = 12
"""Number of the newest steps that are sent again at each change, a minute: gateways write late, and
a reader that missed more is sent the whole page.
"""
ENDED = ("finished", "failed", "aborted")
Values = list[float | None]
Pick = Callable[[SeriesPoint], float | None]


class HourLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a chart. `column`: key of its numbers in `Columns`. `colour`: name of a CSS
    variable. `dashed`: True to tell the line apart without colour. `right`: True for the scale on
    the right.
    """

    column: str
    label: str
    colour: str
    dashed: bool = False
    right: bool = False


class HourChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart. `unit`: text after each number of the left scale. `now`: the latest numbers as text,
    measured at `at_us`, 0 if they are current. `description`: text for readers who cannot see the
    lines.
    """

    key: str
    title: str
    unit: str
    now: str
    description: str
    lines: tuple[HourLine, ...]
    at_us: int = 0


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of consecutive steps, one column per line. `at_s`: time of the first step, in seconds
    since 1970. A number is None in a step that nobody counted.
    """

    at_s: int
    step_s: int = SERIES_STEP_S
    columns: dict[str, Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class HourCharts:
    """Charts of a time series. `stages`: names of the stages in the order of their colours.
    `speaks`: True if first outputs are audio, False if they are text. `is_past`: True for a time
    other than the last hour, whose numbers are not called present.
    """

    series: Sequence[SeriesPoint]
    stages: Sequence[str]
    speaks: bool
    is_past: bool = False

    @property
    def _span(self) -> str:
        return "this time" if self.is_past else "the hour"

    def columns(self, points: Sequence[SeriesPoint]) -> Columns:
        """Return the numbers of `points`, which are steps of the series."""
        return Columns(
            at_s=points[0].at_us // 1_000_000 if points else 0,
            columns={
                name: [_rounded(pick(point)) for point in points]
                for name, pick in self._picks().items()
            },
        )

    def whole(self) -> Columns:
        return self.columns(self.series)

    def recent(self) -> Columns:
        return self.columns(self.series[-RECENT_STEPS:])

    def charts(self) -> tuple[HourChart, ...]:
        return (self._ended(), self._first(), self._tasks(), self._listening())

    def _picks(self) -> Mapping[str, Pick]:
        def first(which: int) -> Pick:
            return lambda point: self._first_ms(point)[which]

        return {
            **{
                state: _counted(lambda p, s=state: p.ended.get(s, 0) / SERIES_STEP_S)
                for state in ENDED
            },
            "p50": first(0),
            "p95": first(1),
            **{
                f"running:{stage}": _counted(lambda p, s=stage: _of_stage(p.running, s))
                for stage in self.stages
            },
            "waiting": _counted(lambda point: sum(point.waiting.values())),
            "underruns": _counted(lambda point: point.underruns),
            "rtf": lambda point: point.rtf_p95,
        }

    def _first_ms(self, point: SeriesPoint) -> tuple[float | None, float | None]:
        if self.speaks:
            return point.first_audio_p50_ms, point.first_audio_p95_ms
        return point.first_text_p50_ms, point.first_text_p95_ms

    def _column(self, name: str) -> Values:
        pick = self._picks()[name]
        return [pick(point) for point in self.series]

    def _top(self, *names: str) -> float:
        return find_top(*(self._column(name) for name in names))

    def _last(self, name: str) -> tuple[float | None, int]:
        return find_last(self._column(name), [point.at_us for point in self.series])

    def _ended(self) -> HourChart:
        minute = self.series if self.is_past else self.series[-RECENT_STEPS:]
        num_ended = sum(sum(point.ended.values()) for point in minute)
        now = formats.rate(num_ended / (len(minute) * SERIES_STEP_S)) if minute else formats.NOTHING
        on_average = "on average" if self.is_past else "in the last minute"
        hour = {s: sum(point.ended.get(s, 0) for point in self.series) for s in ENDED}
        totals = ", ".join(f"{formats.count(count)} {state}" for state, count in hour.items())
        return HourChart(
            key="ended",
            title="Answers per second",
            unit="/s",
            now=now,
            description=f"Answers per second: {now} {on_average}; in {self._span} {totals}",
            lines=(
                HourLine(column="finished", label="finished", colour="good"),
                HourLine(column="failed", label="failed", colour="bad", dashed=True),
                HourLine(column="aborted", label="aborted", colour="edge", dashed=True),
            ),
        )

    def _first(self) -> HourChart:
        (p50, at_us), (p95, _) = self._last("p50"), self._last("p95")
        one = formats.ms(p50)
        now = one if p50 == p95 else f"p50 {one}, p95 {formats.ms(p95)}"
        title = "First sound" if self.speaks else "First text"
        return HourChart(
            key="first",
            title=title,
            unit="ms",
            now=now,
            at_us=0 if self.is_past else at_us,
            description=f"{title}: {now}, of the answers that began in the same {SERIES_STEP_S} s, "
            f"as last measured; at most {formats.ms(self._top('p95'))} in {self._span}",
            lines=(
                HourLine(column="p50", label="p50", colour="accent"),
                HourLine(column="p95", label="p95", colour="warn", dashed=True),
            ),
        )

    def _tasks(self) -> HourChart:
        running = {stage: self._last(f"running:{stage}")[0] or 0 for stage in self.stages}
        waiting, at_us = self._last("waiting")
        now = (
            f"{formats.count(sum(running.values()))} running, {formats.count(waiting)} waiting"
            if at_us
            else formats.NOTHING
        )
        if self.is_past and at_us:
            now = f"at most {formats.count(self._top('waiting'))} waiting"
        each = ", ".join(f"{stage} {formats.count(count)}" for stage, count in running.items())
        return HourChart(
            key="tasks",
            title="Tasks",
            unit="",
            now=now,
            description=f"Tasks: {now}; running by stage: {each}; at most "
            f"{formats.count(self._top('waiting'))} waiting in {self._span}",
            lines=(
                *(
                    HourLine(column=f"running:{stage}", label=stage, colour=f"c{number % 6}")
                    for number, stage in enumerate(self.stages)
                ),
                HourLine(column="waiting", label="waiting", colour="bad", dashed=True),
            ),
        )

    def _listening(self) -> HourChart:
        rtf, _ = self._last("rtf")
        underruns = sum(point.underruns for point in self.series)
        now = f"{formats.count(underruns)} in {self._span}; real-time factor {formats.ratio(rtf)}"
        return HourChart(
            key="listening",
            title="Audio dropouts",
            unit="",
            now=now,
            description=f"Audio dropouts: {now} (p95) as last measured, at most "
            f"{formats.ratio(self._top('rtf'))}",
            lines=(
                HourLine(column="underruns", label="dropouts", colour="bad"),
                HourLine(column="rtf", label="RTF p95", colour="accent", dashed=True, right=True),
            ),
        )


def _counted(pick: Callable[[SeriesPoint], float]) -> Pick:
    """Return `pick`, changed to return None for steps that no gateway wrote: their count is
    unknown, not zero.
    """

    def found(point: SeriesPoint) -> float | None:
        written = point.running or point.waiting or point.ended or point.submitted
        return pick(point) if written else None

    return found


def _of_stage(counts: Mapping[str, int], stage: str) -> int:
    return sum(count for role, count in counts.items() if stage_of(role) == stage)


def _rounded(value: float | None) -> float | None:
    """Round to three digits, so that an hour of numbers stays small."""
    if value is None or value == int(value):
        return None if value is None else int(value)
    return float(f"{value:.3g}")
