"""Results of the scale benchmark. Measures nothing."""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Group

from fleet.lab.measure.scale_costs_result import ScaleCosts
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, at_most
from fleet.lab.report.tables import figure, table_of, titled

HOP_P99_MS, COST_RATIO, JOIN_RATIO, REDIS_US = 50.0, 1.3, 1.5, 60.0
PACE_RATIO = 0.97
"""Smallest allowed ratio of the appended chunks to the chunks of real time. Streams that fall
further behind are a smaller load than reported.
"""


class Ages(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the ages of chunks on arrival, from the producer's timestamp just before the
    append to the consumer.

    Units: microseconds, at most 12 % too high (the bounds of `telemetry/counts.py`).
    """

    count: int
    p50_us: int
    p99_us: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements during a window in which every stream ran.

    `chunks`: chunks appended during the window on all edges together. `between_workers`: ages
    counted by the workers, who report them once per lease, so that they are up to one lease older
    than the window. `cpu_s`: CPU seconds by process name. `generator_cores`: mean CPU cores used by
    the load generator.
    """

    seconds: float
    chunks: int
    between_workers: Ages | None
    to_gateway: Ages | None
    cpu_s: dict[str, float]
    generator_cores: float
    others_cores: float

    @property
    def chunks_per_s(self) -> float:
        return self.chunks / self.seconds

    @property
    def cost_us(self) -> float:
        """CPU time of all processes of the fleet per chunk."""
        return sum(self.cpu_s.values()) / self.chunks * 1e6 if self.chunks else 0.0

    def cost_of_us(self, name: str) -> float:
        return self.cpu_s.get(name, 0.0) / self.chunks * 1e6 if self.chunks else 0.0

    @property
    def hops(self) -> dict[str, Ages | None]:
        return {"between workers": self.between_workers, "worker to gateway": self.to_gateway}


class ScalePhase(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one number of concurrent streams. `broken`: a fault for each stream that did not
    arrive complete, in order and as expected.
    """

    streams: int
    window: Window
    broken: tuple[str, ...] = ()

    @property
    def complete(self) -> int:
        return self.streams - len(self.broken)


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A role with slots for half of the streams, measured before and after a second worker starts.

    `start_s`: time from the start of the worker's process to the first chunk of the last stream.
    """

    role: str
    slots: int
    streams: int
    alone: Window
    together: Window
    start_s: float
    broken: tuple[str, ...] = ()

    @property
    def complete(self) -> int:
        return self.streams - len(self.broken)


class ScaleResult(Result, frozen=True, kw_only=True):
    """Results of the scale benchmark. Every stage produces a row per stream every `step_ms`; each
    of `num_edges` edges carries `num_edges` rows per chunk.

    Hence a stream appends one chunk every `step_ms`, all edges together.
    """

    graph: str
    step_ms: int
    num_edges: int
    phases: tuple[ScalePhase, ...]
    joined: Joined
    costs: ScaleCosts | None = None

    def real_time_per_s(self, streams: int) -> float:
        """Return the chunks per second of `streams` streams that all keep real time."""
        return streams * 1000 / self.step_ms

    @property
    def most_in_time(self) -> int:
        """Largest measured number of streams that kept real time with chunks on time; 0 if none."""
        in_time = (
            phase.streams
            for phase in self.phases
            if phase.window.chunks_per_s >= PACE_RATIO * self.real_time_per_s(phase.streams)
            and all(
                ages is None or ages.p99_us <= HOP_P99_MS * 1e3
                for ages in phase.window.hops.values()
            )
        )
        return max(in_time, default=0)

    @property
    def _windows(self) -> list[Window]:
        return [phase.window for phase in self.phases]

    def tables(self) -> list[Group]:
        return [
            self._phases_table(),
            self._join_table(),
            *(self.costs.tables() if self.costs else ()),
        ]

    def _phases_table(self) -> Group:
        windows = self._windows
        table = table_of("", *(f"{phase.streams} streams" for phase in self.phases))
        for name, *cells in _window_rows(windows):
            table.add_row(name, *cells)
        table.add_section()
        table.add_row("CPU per chunk, us", *(figure(window.cost_us) for window in windows))
        for process in windows[-1].cpu_s:
            table.add_row(
                f"  {process}", *(figure(window.cost_of_us(process)) for window in windows)
            )
        table.add_section()
        table.add_row(
            "complete answers", *(f"{phase.complete} of {phase.streams}" for phase in self.phases)
        )
        pace = (
            f"{self.num_edges} rows per chunk on each of {self.num_edges} edges"
            if self.num_edges > 1
            else "a chunk per row"
        )
        each = f"{self.real_time_per_s(1):g} chunks/s per stream"
        carried = f"{self.most_in_time or 'none'} of these counts in time"
        return titled(
            f"scale: {self.graph}, fake engine, a row every {self.step_ms} ms, {pace}: {each}; "
            f"{carried}",
            table,
        )

    def _join_table(self) -> Group:
        joined, table = self.joined, table_of("", "one worker", "two workers")
        for name, *cells in _window_rows((joined.alone, joined.together)):
            table.add_row(name, *cells)
        table.add_row("complete answers", "", f"{joined.complete} of {joined.streams}")
        slots = f"{joined.streams} streams for {joined.slots} slots of {joined.role}"
        return titled(
            f"{slots}; a second worker, {joined.start_s:.1f} s from its start to its last "
            "stream's first chunk",
            table,
        )

    def panels(self) -> list[Panel]:
        return [self._draw_costs]

    def _draw_costs(self, axes: Axes) -> None:
        """Draw the CPU time per chunk for each number of streams, stacked by process and annotated
        with the 99th percentile of the chunks' ages.
        """
        for place, window in enumerate(self._windows):
            bottom = 0.0
            for number, name in enumerate(window.cpu_s):
                cost_us, label = window.cost_of_us(name), None if place else name
                axes.bar(place, cost_us, bottom=bottom, color=f"C{number}", width=0.6, label=label)
                bottom += cost_us
            late = [ages.p99_us / 1e3 for ages in window.hops.values() if ages is not None]
            axes.annotate(
                f"hop p99\n{max(late, default=0.0):.0f} ms",
                (place, bottom),
                ha="center",
                va="bottom",
                fontsize=8,
            )
        labels = [
            f"{phase.streams} streams\n{phase.window.chunks_per_s:.0f} chunks/s"
            for phase in self.phases
        ]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set(ylabel="us of CPU per chunk", title="CPU per chunk")
        axes.margins(y=0.2)
        axes.legend(fontsize=7)

    def targets(self) -> list[Ratio]:
        """Return the comparisons with the targets: with the most streams, the pace, the ages of
        chunks (p99) and the CPU time of Redis per chunk; from the fewest to the most streams, the
        growth of the CPU time per chunk; the gain by a second worker; the number of incomplete
        answers.
        """
        few, many = self.phases[0], self.phases[-1]
        window, joined = many.window, self.joined
        pace = window.chunks_per_s / self.real_time_per_s(many.streams)
        ratios = [at_least(f"pace of {many.streams} streams / real time", pace, PACE_RATIO)]
        for name, ages in window.hops.items():
            if ages is not None:
                late = f"hop p99 at {many.streams} streams, {name}"
                ratios.append(at_most(late, ages.p99_us / 1e3, HOP_P99_MS, "ms"))
        redis = f"CPU of Redis per chunk, {many.streams} streams"
        ratios.append(at_most(redis, window.cost_of_us("redis"), REDIS_US, "us"))
        if few is not many and few.window.cost_us:
            name = f"CPU per chunk, {many.streams} streams / {few.streams}"
            value = window.cost_us / few.window.cost_us
            ratios.append(at_most(name, value, COST_RATIO))
        if joined.alone.chunks:
            value = joined.together.chunks_per_s / joined.alone.chunks_per_s
            ratios.append(at_least("chunks/s with a second worker", value, JOIN_RATIO))
        broken = sum(len(phase.broken) for phase in (*self.phases, joined))
        ratios.append(at_most("incomplete answers", broken, 0, "answers"))
        return [*ratios, *(self.costs.targets() if self.costs else ())]

    def background_loads(self) -> list[float]:
        return [
            window.others_cores
            for window in (*self._windows, self.joined.alone, self.joined.together)
        ]


def _window_rows(windows: Sequence[Window]) -> Iterator[list[str]]:
    """Yield the table rows: a name, and a cell for each window."""
    yield ["chunks, 1/s", *(figure(window.chunks_per_s) for window in windows)]
    for name in windows[0].hops:
        hops = [window.hops[name] for window in windows]
        yield [f"{name}, p50 ms", *(figure(ages.p50_us / 1e3 if ages else None) for ages in hops)]
        yield [f"{name}, p99 ms", *(figure(ages.p99_us / 1e3 if ages else None) for ages in hops)]
    yield ["load generator, cores", *(figure(window.generator_cores) for window in windows)]
    yield ["background load, cores", *(figure(window.others_cores) for window in windows)]
