"""Result of the measurement of layer spans: the numbers, their tables and their targets. Measures
nothing.
"""

import msgspec
from rich.console import Group

from fleet.lab.report.plot import Axes, Panel, finish_bars
from fleet.lab.report.result import FLEET, MANY, MS, OTHER, PLAYED, TWIN, Result
from fleet.lab.report.stats import Ratio, at_least, at_most, differing, median, percentile
from fleet.lab.report.tables import figure, table_of, titled

ONE, FORWARD, REVERSE = "one process", "forward", "reverse"
CEILINGS = {FORWARD: "forward, computation only", REVERSE: "reverse, computation only"}
COLORS = {
    ONE: PLAYED,
    FORWARD: FLEET,
    REVERSE: MANY,
    CEILINGS[FORWARD]: OTHER,
    CEILINGS[REVERSE]: TWIN,
}
GAIN_TARGET, SHARE_TARGET, SINGLE_TARGET, HOP_TARGET_MS = 1.5, 0.85, 1.05, 0.3


class SpanWork(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work, by name of the arrangement of processes: tokens per second in each round.

    `is_prefill`: prompts are computed, else one token at a time of `num_requests` together.
    """

    name: str
    is_prefill: bool
    num_requests: int
    tokens_per_s: dict[str, tuple[float, ...]]

    def median(self, arrangement: str) -> float:
        return median(self.tokens_per_s[arrangement])

    def relative(self, arrangement: str, other: str) -> float:
        """Return the median over the rounds of a speed relative to that of another arrangement in
        the same round.
        """
        pairs = zip(self.tokens_per_s[arrangement], self.tokens_per_s[other], strict=True)
        return median([own / others for own, others in pairs])

    def gain(self, arrangement: str) -> float:
        """Return the speed relative to one process."""
        return self.relative(arrangement, ONE)

    def share(self, arrangement: str) -> float:
        """Return the share of the ceiling that is reached."""
        return self.relative(arrangement, CEILINGS[arrangement])


class SpanHops(msgspec.Struct, frozen=True, kw_only=True):
    """Passes of one request through `num_workers` span workers, each from its sending to its
    result, without the computation.

    `rounds_s`: of each round of passes. The one with the lowest median counts: other processes only
    add to it.
    """

    num_workers: int
    rounds_s: tuple[tuple[float, ...], ...]

    @property
    def name(self) -> str:
        return f"{self.num_workers} span worker{'s' if self.num_workers > 1 else ''}"

    def hop_ms(self, percent: float) -> float:
        quietest_s = min(self.rounds_s, key=median)
        return percentile(quietest_s, percent) / self.num_workers * MS


class SpansResult(Result, frozen=True, kw_only=True):
    """`num_equal` of `num_answers` answers are the same as those of one process. `others_cores`:
    background load.
    """

    model: str
    spans: str
    works: tuple[SpanWork, ...]
    hops: tuple[SpanHops, ...]
    num_equal: int
    num_answers: int
    others_cores: float | None

    def tables(self) -> list[Group]:
        table = table_of("tokens/s", *(work.name for work in self.works))
        for name in COLORS:
            table.add_row(name, *(figure(work.median(name)) for work in self.works))
        same = f"{self.num_equal} of {self.num_answers} answers are those of one process"
        speeds = titled(f"{self.model}; {self.spans}; a core per process, medians; {same}", table)
        return [speeds, self._hop_table()] if self.hops else [speeds]

    def _hop_table(self) -> Group:
        table = table_of("ms per hop", "p50", "p95", "passes")
        for each in self.hops:
            table.add_row(
                each.name,
                figure(each.hop_ms(50)),
                figure(each.hop_ms(95)),
                f"{len(each.rounds_s)} x {len(each.rounds_s[0])}",
            )
        return titled("passes of a tiny model beyond its computation, the quietest round", table)

    def panels(self) -> list[Panel]:
        return [self._draw]

    def targets(self) -> list[Ratio]:
        ratios = [
            ratio
            for work in self.works
            for direction in CEILINGS
            for ratio in _ratios(work, direction)
        ]
        hops = [
            at_most(f"hop, {each.name}, p50", each.hop_ms(50), HOP_TARGET_MS, "ms")
            for each in self.hops
        ]
        return [*ratios, *hops, differing(self.num_equal, self.num_answers)]

    def background_loads(self) -> list[float | None]:
        return [self.others_cores]

    def _draw(self, axes: Axes) -> None:
        width = 0.8 / len(COLORS)
        for number, (name, color) in enumerate(COLORS.items()):
            places = [
                place + (number - len(COLORS) / 2) * width for place in range(len(self.works))
            ]
            speeds = [work.relative(name, ONE) for work in self.works]
            axes.bar(places, speeds, width, color=color, label=name, align="edge")
        axes.set_xticks(range(len(self.works)), [work.name for work in self.works])
        axes.set(ylabel="speed relative to one process", title=f"layer spans: {self.spans}")
        axes.legend(fontsize=7)
        finish_bars(axes)


def _ratios(work: SpanWork, direction: str) -> list[Ratio]:
    if work.num_requests == 1 and not work.is_prefill:
        name = f"{work.name}, {direction}: time / one process"
        return [at_most(name, 1 / work.gain(direction), SINGLE_TARGET)]
    share = at_least(f"{work.name}, {direction} / ceiling", work.share(direction), SHARE_TARGET)
    if not work.is_prefill:
        return [share]
    name = f"{work.name}, {direction} / one process"
    return [at_least(name, work.gain(direction), GAIN_TARGET), share]
