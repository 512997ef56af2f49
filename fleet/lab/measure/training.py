"""Benchmark of training during serving: how much hidden-state samples slow answers, and how much an
exchange of the draft head does.

Rounds of the same answers alternate: in one the client excludes its answers from samples, in the
next the gateway takes samples of a share of them. At first every sample is held out, so that the
trainer receives and stores but computes nothing; a second fleet trains, on the same cores. There
two versions of the head are then exchanged again and again, while answers are drafted with them.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from rich.console import Group

from fleet.control.client import FleetClient
from fleet.control.embedded import embedded_url
from fleet.drafts.figures.speculation import EAGLE3
from fleet.lab.measure import processes
from fleet.lab.measure.answer_timing import time_answer
from fleet.lab.measure.deployment import RESOLVED_NAME, TargetFleet, started_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.interference import Gap, gaps_of
from fleet.lab.measure.load import run_phase
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, MS, OTHER, PLAYED, Result
from fleet.lab.report.stats import Ratio, at_least, at_most, median, percentile
from fleet.lab.report.tables import figure, table_of, titled

T = TypeVar("T")
TOKENS, LONG_TOKENS, FRAMES = 32, 256, 2
IDLE, TRAINING = ("training.held_out=1",), ("training.checkpoint_windows=1000",)
TRAIN_S, CAPTURES_S = 120.0, 60.0
NUM_SAMPLES = 8


CAPTURE_TARGET = 0.95
"""Smallest allowed speed of answers while a share of them is sampled for the idle trainer, relative
to no hidden-state samples.
"""
GAP_TARGET_MS = 50.0
"""Largest allowed increase of the answers' 99th percentile gap by exchanges of the draft head."""


class CapturedRounds(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds, in tokens/s, of alternating rounds without (`plain`) and with (`captured`)
    hidden-state samples.

    `captures`: number of samples acknowledged during all rounds; a round begins when all samples of
    the round before are complete. `shed`: number of answers chosen for a sample but left out under
    load. `trains`: whether the trainer computed meanwhile, on the same cores.
    """

    trains: bool
    plain: tuple[float, ...]
    captured: tuple[float, ...]
    captures: int
    shed: int

    @property
    def ratio(self) -> float:
        pairs = zip(self.captured, self.plain, strict=True)
        return median([mine / other for mine, other in pairs])


class TrainingCosts(Result, frozen=True, kw_only=True):
    """Costs of hidden-state samples, and of exchanges of the draft head. `share`: share of the
    answers that is sampled. `undisturbed_s`: gaps between text chunks of answers without exchanges;
    `exchanging_s`: the same with `exchanges` exchanges.

    `others_cores`: background load on each of the two fleets.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Amounts of work. `num_answers`: answers per round. `exchanges`: number of exchanges of the
    head, at one per second. `share`: share of the answers of which hidden-state samples are taken.
    """

    num_rounds: int
    num_answers: int
    exchanges: int
    share: float


FULL = TrainingPlan(num_rounds=8, num_answers=96, exchanges=20, share=0.25)
SMALL = TrainingPlan(num_rounds=1, num_answers=8, exchanges=3, share=1.0)


def measure_training(context: Context) -> TrainingCosts:
    """Measure two fleets that are started for the benchmark. Raises: BenchError, ConfigError,
    ApiError if a request fails.
    """
    options = context.options
    plan = SMALL if options.small else FULL
    main = context.resolve().graph_declaration().main_stage.name
    common = (
        *options.overrides,
        "training.enabled=true",
        f"training.share={plan.share}",
        f"stages.{main}.speculation.drafter={EAGLE3}",
    )
    rounds, loads = list[CapturedRounds](), list[float | None]()
    undisturbed, exchanging = list[float](), list[float]()
    for own in (IDLE, TRAINING):
        label = f"starting a fleet whose trainer {'is idle' if own is IDLE else 'trains'}"
        with started_fleet(context, label, *common, *own) as target:
            load, background = _AnswerLoad(target, options.concurrency), BackgroundLoad()
            step = context.steps(
                "answers, in turn without captures and with them",
                2 * plan.num_rounds * plan.num_answers,
            )
            rounds.append(load.capture_rounds(plan, step, trains=own is TRAINING))
            if own is TRAINING:
                undisturbed, exchanging = load.exchange(
                    plan, context.steps("exchanges of the head", plan.exchanges)
                )
            loads.append(background.cores())
    return TrainingCosts(
        share=plan.share,
        concurrency=options.concurrency,
        rounds=tuple(rounds),
        undisturbed_s=tuple(undisturbed),
        exchanging_s=tuple(exchanging),
        exchanges=plan.exchanges,
        others_cores=tuple(loads),
    )


class RunCall(Protocol):
    """Function that runs one asynchronous call of a fleet client and returns the result."""

    def __call__(self, call: Callable[[FleetClient], Awaitable[T]]) -> T: ...


class _AnswerLoad:
    """Load of answers on one fleet."""

    def __init__(self, target: TargetFleet, concurrency: int) -> None:
        self._target, self._concurrency = target, concurrency
        self._model = target.api.model()

    def _body(self, number: int, num_tokens: int, *, store: bool) -> bytes:
        bounds, prompt = (
            stage_bounds(self._target.config, num_tokens, FRAMES),
            f"{number}. {PROMPTS[number % len(PROMPTS)]}",
        )
        return encode_call(
            self._model, prompt, self._target.config, bounds, media=("text",), store=store
        )

    def capture_rounds(
        self, plan: TrainingPlan, step: Callable[[], None], *, trains: bool
    ) -> CapturedRounds:
        works = {
            name: [self._body(number, TOKENS, store=store) for number in range(plan.num_answers)]
            for name, store in (("plain", False), ("captured", True))
        }
        speeds: dict[str, list[float]] = {name: [] for name in works}
        with _fleet_client(self._target) as run:

            def one_round(name: str, bodies: Sequence[bytes], advance: Callable[[], None]) -> float:
                tokens_per_s = run_phase(
                    name, self._target.api, bodies, self._concurrency, advance
                ).tokens_per_s
                _await_captures(run)
                return tokens_per_s

            one_round("warm-up", works["captured"][: self._concurrency], lambda: None)
            before = run(lambda client: client.training.counts())
            for number in range(plan.num_rounds):
                for name in sorted(works, reverse=bool(number % 2)):
                    speeds[name].append(one_round(name, works[name], step))
            after = run(lambda client: client.training.counts())
        return CapturedRounds(
            trains=trains,
            plain=tuple(speeds["plain"]),
            captured=tuple(speeds["captured"]),
            captures=after["acknowledged"] - before["acknowledged"],
            shed=after["shed"] - before["shed"],
        )

    def exchange(
        self, plan: TrainingPlan, step: Callable[[], None]
    ) -> tuple[list[float], list[float]]:
        """Train two versions of the head, then replace one by the other once per second. Return the
        gaps between text chunks before and during these exchanges, in seconds.
        """
        for number in (1, 2):
            self._train(f"bench {number}")
        stop, began_s, versions = threading.Event(), time.perf_counter(), (1, 2)
        with ThreadPoolExecutor(self._concurrency) as pool, _fleet_client(self._target) as run:
            streams = [
                pool.submit(self._stream, number, stop, began_s)
                for number in range(self._concurrency)
            ]
            try:
                run(lambda client: client.training.promote(versions[-1]))
                time.sleep(3.0)
                begins_s = time.perf_counter() - began_s
                time.sleep(plan.exchanges)
                middle_s = time.perf_counter() - began_s
                for number in range(plan.exchanges):
                    run(
                        lambda client, version=versions[number % 2]: client.training.promote(
                            version
                        )
                    )
                    step()
                    time.sleep(1.0)
                ends_s = time.perf_counter() - began_s
            finally:
                stop.set()
            gaps = [gap for stream in streams for gap in stream.result()]
        undisturbed = [gap.gap_s for gap in gaps if begins_s <= gap.at_s < middle_s]
        return undisturbed, [gap.gap_s for gap in gaps if middle_s <= gap.at_s < ends_s]

    def _stream(self, number: int, stop: threading.Event, began_s: float) -> list[Gap]:
        """Request one long answer after another until `stop` is set; return the gaps between their
        text chunks.
        """
        gaps, at = list[Gap](), number
        while not stop.is_set():
            gaps += gaps_of(
                time_answer(
                    0,
                    self._target.api.record_chat(self._body(at, LONG_TOKENS, store=False)),
                    began_s,
                )
            )
            at += self._concurrency
        return gaps

    def _train(self, name: str) -> None:
        """Train on a few answers and make a version of the head with `fleet train`. Raises:
        BenchError with the end of its output.
        """
        log, pool = (
            self._target.config.data_dir / "train.log",
            self._target.config.data_dir / "pool.jsonl",
        )
        lines = (
            {"prompt": prompt, "answer": f"{name}: {prompt}"} for prompt in PROMPTS[:NUM_SAMPLES]
        )
        pool.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
        command = [*processes.FLEET, "train", "--pool", str(pool), "--name", name]
        config = ["--config", str(self._target.config.data_dir / RESOLVED_NAME)]
        process = processes.start(
            [*command, *config], processes.own_environment(), log, signal.SIGTERM
        )
        if process.wait(TRAIN_S) != 0:
            raise BenchError(f"`fleet train` failed:\n{processes.end_of(log)}")


def _await_captures(run: RunCall) -> None:
    """Wait until the hidden-state samples of a round are complete, so that they do not slow the
    next round. Raises: BenchError.
    """
    deadline_s = time.monotonic() + CAPTURES_S
    while num_live := run(lambda client: client.telemetry.num_live()):
        if time.monotonic() > deadline_s:
            raise BenchError(
                f"{num_live} captures have not ended {CAPTURES_S:.0f} s after the last answer"
            )
        time.sleep(0.05)


@contextmanager
def _fleet_client(target: TargetFleet) -> Iterator[RunCall]:
    """Connect a client to the fleet during the block. Yield a function that runs calls of this
    client.
    """
    with asyncio.Runner() as runner:
        client = runner.run(
            FleetClient.connect(embedded_url(target.config.redis_data_dir), target.config)
        )

        def run(call: Callable[[FleetClient], Awaitable[T]]) -> T:
            async def awaited() -> T:
                return await call(client)

            return runner.run(awaited())

        try:
            yield run
        finally:
            runner.run(client.stop())


MEASUREMENT = Measurement(
    place=120,
    key="training",
    run=measure_training,
    option="--training",
    help="measure answers beside captures, and exchanges of the draft head",
    has_small=True,
    about={
        "--training": "answers of a fleet while a quarter of them is captured, and without "
        "captures, in turn: tokens per second, with a trainer that computes nothing, and with one "
        "that trains on the same cores. Then two versions of the draft head are exchanged each "
        "second, under load: gaps of answers. With --small a few answers"
    },
)
