"""Result of the measurement of training beside answers: the numbers, their tables and their
targets. Measures nothing.
"""

import msgspec
from rich.console import Group

from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, MS, OTHER, PLAYED, Result
from fleet.lab.report.stats import Ratio, at_least, at_most, median, percentile
from fleet.lab.report.tables import figure, table_of, titled

CAPTURE_TARGET = 0.95
"""Tokens/s of answers while a share of them is captured, relative to those without captures, with
an idle trainer.
"""
GAP_TARGET_MS = 50.0
"""The most that exchanges of the draft head add to the 99th percentile of the gaps of answers."""


class CapturedRounds(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of answers, in turn without and with captures: tokens/s. `captures`: that were
    acknowledged, each round's before the next began; `shed`: answers that were drawn for a capture
    and left out under load; `trains`: windows were computed meanwhile, on the cores of the answers.
    """

    trains: bool
    plain: tuple[float, ...]
    captured: tuple[float, ...]
    captures: int
    shed: int

    @property
    def ratio(self) -> float:
        return median(mine / other for mine, other in zip(self.captured, self.plain, strict=True))


class TrainingCosts(Result, frozen=True, kw_only=True):
    """`undisturbed_s`, `exchanging_s`: gaps between the text chunks of answers, in the latter with
    `exchanges` of the head.

    `others_cores`: background load.
    """

    share: float
    concurrency: int
    rounds: tuple[CapturedRounds, ...]
    undisturbed_s: tuple[float, ...]
    exchanging_s: tuple[float, ...]
    exchanges: int
    others_cores: tuple[float | None, ...]

    @property
    def added_gap_ms(self) -> float:
        return MS * (percentile(self.exchanging_s, 99) - percentile(self.undisturbed_s, 99))

    def tables(self) -> list[Group]:
        captures = table_of(
            "trainer", "tokens/s without captures", "with", "ratio", "captures", "shed"
        )
        for one in self.rounds:
            captures.add_row(
                "trains" if one.trains else "idle",
                figure(median(one.plain)),
                figure(median(one.captured)),
                figure(one.ratio),
                f"{one.captures}",
                f"{one.shed}",
            )
        gaps = table_of("gaps of answers, ms", "p50", "p95", "p99", "max")
        for name, samples in (
            ("undisturbed", self.undisturbed_s),
            (f"{self.exchanges} exchanges of the head", self.exchanging_s),
        ):
            gaps.add_row(
                name, *(figure(MS * percentile(samples, percent)) for percent in (50, 95, 99, 100))
            )
        title = (
            f"{self.share:.0%} of answers captured, {self.concurrency} at a time; medians "
            f"of {len(self.rounds[0].plain)} rounds"
        )
        return [titled(title, captures), titled("exchanges of the draft head under load", gaps)]

    def panels(self) -> list[Panel]:
        return [self._draw_rounds, self._draw_gaps]

    def targets(self) -> list[Ratio]:
        idle = next(one for one in self.rounds if not one.trains)
        return [
            at_least("captures / none, trainer idle", idle.ratio, CAPTURE_TARGET),
            at_most("p99 of gaps, added by exchanges", self.added_gap_ms, GAP_TARGET_MS, "ms"),
        ]

    def background_loads(self) -> list[float | None]:
        return list(self.others_cores)

    def _draw_rounds(self, axes: Axes) -> None:
        for one, style in zip(self.rounds, ("o-", "s--"), strict=False):
            trainer = "trainer trains" if one.trains else "trainer idle"
            axes.plot(
                range(1, len(one.plain) + 1),
                one.plain,
                style,
                color=PLAYED,
                label=f"without captures, {trainer}",
            )
            axes.plot(
                range(1, len(one.captured) + 1),
                one.captured,
                style,
                color=FLEET,
                label=f"with captures, {trainer}",
            )
        axes.set(xlabel="round", ylabel="tokens/s", title="answers beside captures")
        axes.set_ylim(bottom=0)
        axes.legend()

    def _draw_gaps(self, axes: Axes) -> None:
        for samples, color, name in (
            (self.undisturbed_s, PLAYED, "undisturbed"),
            (self.exchanging_s, OTHER, "exchanges"),
        ):
            lengths = sorted(MS * sample for sample in samples)
            axes.step(
                lengths,
                [1 - place / len(lengths) for place in range(len(lengths))],
                color=color,
                label=name,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="ms",
            ylabel="share of longer gaps",
            title="gaps of answers",
        )
        axes.legend()
