"""Result of the measurement of speculation: the numbers, their tables and their targets. Measures
nothing.
"""

import msgspec
from rich.console import Group

from fleet.core.request import RequestSpec
from fleet.drafts.figures.speculation import EAGLE3, NGRAM, OFF, SUFFIX
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, MANY, OTHER, PLAYED, Result
from fleet.lab.report.stats import Ratio, at_least, differing, median
from fleet.lab.report.tables import figure, table_of, titled

COLORS = {OFF: PLAYED, NGRAM: OTHER, SUFFIX: FLEET, EAGLE3: MANY}
LOSS_TARGET = 0.97
"""Tokens/s relative to those without speculation, below which no batch with it may be."""


SPEEDS = {"fast": 1.3, "invariant": 1.5}
"""Least tokens/s of one answer with the trained head, relative to those without speculation, by
numerics.
"""
LEAST_ACCEPTANCE = 2.5
"""Least mean tokens of one answer in one pass with the trained head."""


class HeadWork(msgspec.Struct, frozen=True, kw_only=True):
    """Training of the head: `taught` are answered and trained on, for so many seconds; `held_out`
    are not trained on.
    """

    taught: tuple[RequestSpec, ...]
    held_out: tuple[RequestSpec, ...]
    seconds: float


class TrainedHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head that was trained. `held_out`: drafts in a row that are right, on samples that were
    not trained on.
    """

    windows: int
    samples: int
    refused: int
    seconds: float
    held_out: float


class SpeculationWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one process: `taught` are answered first, as earlier traffic, then `asked` by each
    drafter in each round.

    `num_rounds`: with a batch of one.
    """

    taught: tuple[RequestSpec, ...]
    asked: tuple[RequestSpec, ...]
    batches: tuple[int, ...]
    num_rounds: int

    def rounds_of(self, batch: int) -> int:
        """Return the number of rounds with a batch: those with larger ones are shorter, so that
        more are needed.
        """
        return self.num_rounds * min(batch, 3)


class DraftedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one drafter, `batch` at a time. `tokens_per_s` of each round; `acceptance_length`:
    tokens of a request per pass.

    `shares`: of the drafts at each position that were accepted. `num_equal` answers are those
    without speculation.
    """

    numerics: str
    drafter: str
    batch: int
    tokens_per_s: tuple[float, ...]
    acceptance_length: float
    shares: tuple[float, ...]
    num_equal: int
    num_answers: int


class SpeculationResult(Result, frozen=True, kw_only=True):
    """`others_cores`: background load."""

    model: str
    head: TrainedHead
    runs: tuple[DraftedRuns, ...]
    others_cores: tuple[float | None, ...]

    def gain(self, run: DraftedRuns) -> float:
        """Return the speed relative to that without speculation: the median over the rounds, in
        each of which both ran.
        """
        plain = next(
            one
            for one in self.runs
            if (one.numerics, one.batch, one.drafter) == (run.numerics, run.batch, OFF)
        )
        return median(
            mine / other for mine, other in zip(run.tokens_per_s, plain.tokens_per_s, strict=True)
        )

    @property
    def _compared(self) -> tuple[int, int]:
        """Return how many answers are those without speculation, and the number of all answers."""
        return sum(run.num_equal for run in self.runs), sum(run.num_answers for run in self.runs)

    def tables(self) -> list[Group]:
        table = table_of(
            "numerics",
            "batch",
            "drafter",
            "tokens/s",
            "of off",
            "tokens per pass",
            "accepted by position",
        )
        for run in self.runs:
            table.add_row(
                run.numerics,
                f"{run.batch}",
                run.drafter,
                figure(median(run.tokens_per_s)),
                figure(self.gain(run)),
                figure(run.acceptance_length),
                " ".join(f"{share:.2f}" for share in run.shares),
            )
        num_equal, num_answers = self._compared
        same = f"{num_equal} of {num_answers} answers are those without speculation"
        head = (
            f"the head of eagle3 was trained for {self.head.seconds / 60:.1f} min on "
            f"{self.head.samples} answers, "
            f"{self.head.windows} windows; held out: {self.head.held_out:.2f} right guesses in "
            "a row"
        )
        rounds = sorted({len(run.tokens_per_s) for run in self.runs})
        return [
            titled(
                f"{self.model}; medians of {' or '.join(map(str, rounds))} rounds; {same}\n{head}",
                table,
            )
        ]

    def panels(self) -> list[Panel]:
        return [self._draw]

    def targets(self) -> list[Ratio]:
        drafted = [run for run in self.runs if run.drafter != OFF]
        trained = [run for run in drafted if (run.drafter, run.batch) == (EAGLE3, 1)]
        ratios = [
            at_least(
                f"{run.drafter} / {OFF}, {run.numerics}, batch {run.batch}",
                self.gain(run),
                SPEEDS[run.numerics] if run in trained else LOSS_TARGET,
            )
            for run in drafted
        ]
        for run in trained:
            name = f"tokens per pass, {run.drafter}, {run.numerics}"
            ratios.append(at_least(name, run.acceptance_length, LEAST_ACCEPTANCE))
        return [*ratios, differing(*self._compared)]

    def background_loads(self) -> list[float | None]:
        return list(self.others_cores)

    def _draw(self, axes: Axes) -> None:
        for numerics, style in (("fast", "o-"), ("invariant", "s--")):
            for drafter, color in COLORS.items():
                points = [
                    (run.batch, self.gain(run))
                    for run in self.runs
                    if (run.numerics, run.drafter) == (numerics, drafter)
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        style,
                        color=color,
                        label=f"{drafter}, {numerics}",
                    )
        axes.set(xscale="log", xlabel="batch", ylabel="tokens/s of off", title="speculation")
        axes.legend()
