"""Speculation benchmark: one stage in one process answers the same questions with each drafter in
turn, round by round.

Before, a draft head is trained on answers to other questions, and the table of served answers is
filled with the same answers. Invariant and fast numerics run in separate processes.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Group

from fleet.config import FleetConfig
from fleet.config.values import AUTO
from fleet.core.ids import new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.figures.speculation import EAGLE3, NGRAM, OFF, SUFFIX
from fleet.graphs import Stage
from fleet.lab.measure.calls import call
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.serving import local_checkpoint
from fleet.lab.pocket.corpus.dialogue import Split
from fleet.lab.pocket.corpus.generate import dialogues
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, MANY, OTHER, PLAYED, Result
from fleet.lab.report.stats import Ratio, at_least, differing, median
from fleet.lab.report.tables import figure, table_of, titled
from fleet.processing import ChatRequest, Frontend, Message, TextPart, open_frontend

HEAD = "fleet.lab.measure.speculation_head:train"
RUNS = "fleet.lab.measure.speculation_run:measure"
COLORS = {OFF: PLAYED, NGRAM: OTHER, SUFFIX: FLEET, EAGLE3: MANY}
LOSS_TARGET = 0.97
"""Smallest allowed speed with speculation, relative to no speculation, at any batch size."""


SPEEDS = {"fast": 1.3, "invariant": 1.5}
"""Target speed of a single answer with the trained head, relative to no speculation, by
numerics.
"""
LEAST_ACCEPTANCE = 2.5
"""Target for the mean number of tokens per verification step of a single answer with the trained
head.
"""


class HeadWork(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the head's training. `taught`: requests whose answers are trained on. `held_out`:
    requests whose answers only evaluate the head. `seconds`: duration of the training.
    """

    taught: tuple[RequestSpec, ...]
    held_out: tuple[RequestSpec, ...]
    seconds: float


class TrainedHead(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of the head's training. `windows`: windows trained on. `refused`: samples that did
    not fit the head. `held_out`: mean number of successive correct draft tokens on held-out
    samples.
    """

    windows: int
    samples: int
    refused: int
    seconds: float
    held_out: float


class SpeculationWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one process: `taught` are answered first, as earlier traffic; then each drafter
    answers `asked` in each round.

    `batches`: batch sizes. `num_rounds`: number of rounds at batch size 1.
    """

    taught: tuple[RequestSpec, ...]
    asked: tuple[RequestSpec, ...]
    batches: tuple[int, ...]
    num_rounds: int

    def rounds_of(self, batch: int) -> int:
        """Return the number of rounds at a batch size. Larger batches take less time per round, so
        more rounds are run.
        """
        return self.num_rounds * min(batch, 3)


class DraftedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Answers with one drafter at one batch size. `tokens_per_s`: speed in each round.
    `acceptance_length`: mean number of tokens that a request gains per verification step.

    `shares`: accepted share of the draft tokens at each position. `num_equal`: number of answers
    equal to the answers without speculation.
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
    """Results of all drafters and batch sizes, and of the head's training. `others_cores`:
    background load during the training, then during the runs with each kind of numerics.
    """

    model: str
    head: TrainedHead
    runs: tuple[DraftedRuns, ...]
    others_cores: tuple[float | None, ...]

    def gain(self, run: DraftedRuns) -> float:
        """Return the speed of `run` relative to no speculation at the same batch size, as the
        median of the ratios within each round.
        """
        plain = next(
            one
            for one in self.runs
            if (one.numerics, one.batch, one.drafter) == (run.numerics, run.batch, OFF)
        )
        pairs = zip(run.tokens_per_s, plain.tokens_per_s, strict=True)
        return median([mine / other for mine, other in pairs])

    @property
    def _compared(self) -> tuple[int, int]:
        """Number of answers equal to the answers without speculation, and number of all answers."""
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


SEED, NUM_LINES = 1, 100
TRAINING = (
    "engine=torch",
    "numerics=fast",
    "training.enabled=true",
    "training.window_samples=8",
    "training.batch_samples=8",
)
"""Settings of the training process, whose stage produces answers and hidden-state samples while the
head is trained.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Amounts of work. `train_s`: training time of the draft head. `num_taught`: requests answered
    before the measurement, as earlier traffic. `num_asked`: requests that each drafter answers in
    each round. `num_tokens`: length limit of an answer.
    """

    train_s: float
    num_taught: int
    num_asked: int
    num_tokens: int
    batches: tuple[int, ...]
    num_rounds: int
    numerics: tuple[str, ...]


FULL = SpeculationPlan(
    train_s=16 * 60,
    num_taught=3000,
    num_asked=48,
    num_tokens=48,
    batches=(1, 4, 8, 16),
    num_rounds=6,
    numerics=("fast", "invariant"),
)
SMALL = SpeculationPlan(
    train_s=4,
    num_taught=8,
    num_asked=4,
    num_tokens=12,
    batches=(1, 4),
    num_rounds=1,
    numerics=("fast",),
)


def measure_speculation(context: Context) -> SpeculationResult:
    """Measure the stage of the configured graph that verifies drafts, with any checkpoint.

    Raises: ConfigError; BenchError for a graph without such a stage.
    """
    plan = SMALL if context.options.small else FULL
    config = context.resolve()
    graph = config.graph_declaration()
    stage = next((stage for stage in graph.stages if stage.verifies_drafts), None)
    if stage is None:
        raise BenchError(
            f"--speculation needs a stage that verifies drafts, and {config.graph} has none",
            param="--speculation",
        )
    shipped = graph.shipped_folder()
    checkpoint = (
        shipped if config.checkpoint == AUTO and shipped is not None else local_checkpoint(config)
    )
    frontend = open_frontend(config, checkpoint)
    work = SpeculationWork(
        taught=_requests(config, stage, frontend, plan, "train", plan.num_taught),
        asked=_requests(config, stage, frontend, plan, "held_out", plan.num_asked),
        batches=plan.batches,
        num_rounds=plan.num_rounds,
    )
    loads = list[float | None]()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        folder, checkpoint_own = Path(name), f"checkpoint={checkpoint}"
        training = (checkpoint_own, *TRAINING, f"training.folder={folder / 'training'}")
        head = HeadWork(taught=work.taught, held_out=work.asked, seconds=plan.train_s)
        background_load = BackgroundLoad()
        trained = call(
            HEAD,
            *(context.resolve(*training), head, folder / "head"),
            kind=TrainedHead,
            advance=context.steps("training of a draft head", NUM_LINES),
        )
        loads.append(background_load.cores())
        runs = list[DraftedRuns]()
        for numerics in plan.numerics:
            drafting = (
                checkpoint_own,
                f"numerics={numerics}",
                f"stages.{stage.name}.speculation.head={folder / 'head'}",
                f"stages.{stage.name}.speculation.drafter={EAGLE3}",
            )
            num_rounds = 1 + sum(map(work.rounds_of, work.batches))
            background_load = BackgroundLoad()
            runs += call(
                RUNS,
                *(context.resolve(*drafting), work),
                kind=tuple[DraftedRuns, ...],
                advance=context.steps(f"speculation, {numerics}", num_rounds),
            )
            loads.append(background_load.cores())
    return SpeculationResult(
        model=checkpoint.name, head=trained, runs=tuple(runs), others_cores=tuple(loads)
    )


def _requests(
    config: FleetConfig,
    stage: Stage,
    frontend: Frontend,
    plan: SpeculationPlan,
    split: Split,
    count: int,
) -> tuple[RequestSpec, ...]:
    """Prepare `count` greedy requests with questions of Pocket's corpus; no question of the split
    `held_out` is in `train`.
    """
    graph = config.graph_declaration()
    text = tuple(edge for edge, kind in graph.media.items() if kind == "text")
    sampling = {stage.name: Sampling(max_tokens=plan.num_tokens)}
    specs: list[RequestSpec] = []
    for dialogue in dialogues(split, count, SEED):
        messages = tuple(
            Message(role=turn.role, content=TextPart(text=turn.text, where="messages"))
            for turn in dialogue.turns[:-1]
        )
        chat = ChatRequest(
            id=new_request_id(),
            graph=graph.name,
            messages=messages,
            outputs=text,
            sampling=sampling,
            spoken=False,
        )
        specs.append(frontend.prepare(chat)[0])
    return tuple(specs)


MEASUREMENT = Measurement(
    place=110,
    key="speculation",
    run=measure_speculation,
    option="--speculation",
    help="measure answers with each drafter",
    has_small=True,
    about={
        "--speculation": "one stage in one process, which answers held-out questions of Pocket's "
        "corpus with each drafter and without, at batch 1, 4, 8 and 16, in fast and in invariant "
        "numerics: tokens per second, tokens of a request per pass, and the share of accepted "
        "drafts by position. `suffix` has served 3,000 other questions before, and the head of "
        "`eagle3` is trained on their answers for 16 minutes. With --set graph=text "
        "--set checkpoint=DIR a model of your own, with --small a few questions"
    },
)
