"""Result of the measurement of a divided model over slow links: the numbers, their table and their
targets. Measures nothing.
"""

import msgspec
from rich.console import Group

from fleet.lab.report.result import MS, Result
from fleet.lab.report.stats import Ratio, at_most, differing, median
from fleet.lab.report.tables import figure, table_of, titled

NETWORK_TARGET = 1.2
KIB = 1024


class LinkedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps of one request through all processes, and messages of the same sizes over plain
    TCP on the same links.

    `step_s`: of each step, over the links; `undelayed_s`: without their delay. `hop_s`: the part of
    each step that no process computed. `tcp_s`: of each round of messages. `sizes`: bytes of a step
    on each link, in the order of the processes.
    """

    name: str
    step_s: tuple[float, ...]
    hop_s: tuple[float, ...]
    undelayed_s: tuple[float, ...]
    tcp_s: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def computed_s(self) -> float:
        """The median of the computation in a step, of all processes together."""
        return median([step - hop for step, hop in zip(self.step_s, self.hop_s, strict=True)])

    @property
    def share(self) -> float:
        """The time of a step beyond its computation, relative to plain TCP (medians)."""
        return (median(self.step_s) - self.computed_s) / median(self.tcp_s)


class LinksResult(Result, frozen=True, kw_only=True):
    """`delay_ms`: of each link, one way. `num_equal` of `num_answers` answers are those without the
    delay.
    """

    model: str
    delay_ms: float
    steps: tuple[LinkedSteps, ...]
    num_equal: int
    num_answers: int
    others_cores: float | None

    def tables(self) -> list[Group]:
        table = table_of("ms, p50", "step", "computed", "plain TCP", "ratio", "no delay", "KiB")
        for each in self.steps:
            medians = [median(each.step_s), each.computed_s, median(each.tcp_s)]
            sizes = " + ".join(figure(size / KIB) for size in each.sizes)
            cells = [*(figure(value * MS) for value in medians), figure(each.share)]
            table.add_row(each.name, *cells, figure(median(each.undelayed_s) * MS), sizes)
        same = f"{self.num_equal} of {self.num_answers} answers are those without the delay"
        return [
            titled(f"{self.model}; decode of 1 over links of {self.delay_ms:g} ms; {same}", table)
        ]

    def targets(self) -> list[Ratio]:
        times = [
            at_most(f"{each.name}: step minus computed / plain TCP", each.share, NETWORK_TARGET)
            for each in self.steps
        ]
        return [*times, differing(self.num_equal, self.num_answers)]

    def background_loads(self) -> list[float | None]:
        return [self.others_cores]
