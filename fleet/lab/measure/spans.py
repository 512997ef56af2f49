"""Benchmark of layer spans: one model in one process, and divided between two processes, in either
direction; and the communication time of a step.

Every process has its own core. All arrangements of processes do the same work in turn, round by
round, so that the speeds of a round can be compared even if the machine's speed changes. The
ceiling of an arrangement is its speed without communication, for the same steps: two processes
compute their halves at the same time, or for one request, whose steps depend on each other, one
after the other.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Group

from fleet.config import FleetConfig
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.spans_process import SpanGroup, SpanProcess, span_group
from fleet.lab.measure.spans_protocol import Answer, Compute, SpanReply
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.plot import Axes, Panel, finish_bars
from fleet.lab.report.result import FLEET, MANY, MS, OTHER, PLAYED, TWIN, Result
from fleet.lab.report.stats import Ratio, at_least, at_most, differing, median, percentile
from fleet.lab.report.tables import figure, table_of, titled

GRAPH = "text"
KV_PAGES, MAX_BATCH = 1024, 32
WARM_UP_PROMPT, WARM_UP_TOKENS = 300, 4


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
    """Measured speed of one kind of work: tokens per second in each round, by arrangement of
    processes.

    `is_prefill`: True for prompts, False for decode steps of `num_requests` requests together.
    """

    name: str
    is_prefill: bool
    num_requests: int
    tokens_per_s: dict[str, tuple[float, ...]]

    def median(self, arrangement: str) -> float:
        return median(self.tokens_per_s[arrangement])

    def relative(self, arrangement: str, other: str) -> float:
        """Return an arrangement's speed relative to another in the same round: median over
        rounds.
        """
        pairs = zip(self.tokens_per_s[arrangement], self.tokens_per_s[other], strict=True)
        return median([own / others for own, others in pairs])

    def gain(self, arrangement: str) -> float:
        """Return an arrangement's speed relative to one process."""
        return self.relative(arrangement, ONE)

    def share(self, arrangement: str) -> float:
        """Return an arrangement's speed relative to its ceiling."""
        return self.relative(arrangement, CEILINGS[arrangement])


class SpanHops(msgspec.Struct, frozen=True, kw_only=True):
    """Communication time of steps of one request through `num_workers` span workers: the time from
    the anchor's sending to the result, minus computation.

    `rounds_s`: times by round. The round with the lowest median counts: other load only adds time.
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
    """Speeds of a divided model. `num_equal` of `num_answers` answers equal one process's."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanModelSize:
    """Sizes of a random model; all further sizes follow from them."""

    hidden: int
    layers: int
    kv_heads: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansPlan:
    """The random model and amounts of work. `works`: kinds of work, each with its number of rounds.

    `num_hops`: steps per round in the measurement of communication, made for each `num_workers`.
    """

    size: SpanModelSize
    works: Sequence[tuple[Answer, int]]
    num_hops: int
    num_hop_rounds: int
    num_workers: tuple[int, ...]


FULL = SpansPlan(
    size=SpanModelSize(hidden=1024, layers=12, kv_heads=8, vocabulary=32_000),
    works=(
        (Answer(num_requests=1, num_prompt=2000, num_tokens=1), 3),
        (Answer(num_requests=1, num_prompt=16, num_tokens=17), 15),
        (Answer(num_requests=32, num_prompt=16, num_tokens=33), 5),
    ),
    num_hops=300,
    num_hop_rounds=5,
    num_workers=(1, 3),
)
"""Model of 254 million parameters, of which 189 million are in layers. The first token of an answer
counts as prefill.
"""
SMALL = SpansPlan(
    size=SpanModelSize(hidden=64, layers=4, kv_heads=1, vocabulary=1000),
    works=(
        (Answer(num_requests=1, num_prompt=300, num_tokens=1), 1),
        (Answer(num_requests=1, num_prompt=16, num_tokens=9), 2),
        (Answer(num_requests=4, num_prompt=16, num_tokens=9), 1),
    ),
    num_hops=0,
    num_hop_rounds=0,
    num_workers=(),
)


def measure_spans(context: Context) -> SpansResult:
    """Measure the configured checkpoint, or else a random one that is written for the run. Raises:
    BenchError, ConfigError.
    """
    plan = SMALL if context.options.small else FULL
    with tempfile.TemporaryDirectory(prefix="fleet-bench-spans-") as folder:
        bench = _SpansBench(Path(folder), context, plan)
        background_load = BackgroundLoad()
        hops = tuple(bench.measure_hops(number) for number in plan.num_workers)
        works, equal = bench.measure_works()
        return SpansResult(
            model=bench.model,
            spans=bench.spans,
            works=works,
            hops=hops,
            num_equal=sum(equal),
            num_answers=len(equal),
            others_cores=background_load.cores(),
        )


class _SpansBench:
    """A run of the benchmark, with its folder, checkpoints and processes."""

    def __init__(self, folder: Path, context: Context, plan: SpansPlan) -> None:
        """Choose the checkpoint and the spans, and prepare the configurations to be measured.

        Raises: ConfigError; BenchError for a graph whose layers cannot be divided.
        """
        self._folder = folder
        self._plan = plan
        self._steps = context.steps
        self._cores = usable_cores()
        self._base = divisible_config(context)
        self._stage = self._base.graph_declaration().stages[0].name
        self._is_random = self._base.checkpoint == "auto"
        checkpoint, num_layers = self._checkpoint(), plan.size.layers
        if not self._is_random:
            num_layers = num_layers_of(checkpoint)
        first, second = halves(num_layers)
        self.spans = f"{first} and {second}"
        self._configs = {
            ONE: arranged(self._base, checkpoint),
            FORWARD: arranged(self._base, checkpoint, first, second),
            REVERSE: arranged(self._base, checkpoint, second, first),
        }

    def _checkpoint(self) -> Path:
        """Return the checkpoint to measure; write a random one if the configuration names none."""
        if not self._is_random:
            self.model = Path(self._base.checkpoint).name
            return Path(self._base.checkpoint)
        plan, checkpoint = self._plan, self._folder / "model"
        num_parameters = write_random(checkpoint, plan.size)
        self.model = f"{num_parameters / 1e6:.0f} million random parameters"
        return checkpoint

    def measure_works(self) -> tuple[tuple[SpanWork, ...], list[bool]]:
        """Measure prefill and decode. Return the speeds, and for each answer of divided processes
        to a single request, whether it equals the answer of one process.
        """
        measured: list[SpanWork] = []
        equal: list[bool] = []
        with self._arrangements() as groups:
            step = self._steps(
                "rounds of prefill and decode",
                sum(1 + num_rounds for _, num_rounds in self._plan.works),
            )
            for work, num_rounds in self._plan.works:
                Round(groups, shortened(work), step).measured()
                rounds = [Round(groups, work, step).measured() for _ in range(num_rounds)]
                speeds = {
                    key: tuple(each.speeds[key] for each in rounds) for key in rounds[0].speeds
                }
                is_prefill = work.num_tokens == 1
                measured.append(
                    SpanWork(
                        name=f"prefill of {work.num_prompt}"
                        if is_prefill
                        else f"decode of {work.num_requests}",
                        is_prefill=is_prefill,
                        num_requests=work.num_requests,
                        tokens_per_s=speeds,
                    )
                )
                equal += [same for each in rounds for same in each.same if work.num_requests == 1]
        return tuple(measured), equal

    @contextmanager
    def _arrangements(self) -> Iterator[dict[str, SpanGroup]]:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(span_group(name, config, int(name != ONE), self._cores))
                for name, config in self._configs.items()
            }

    def measure_hops(self, num_workers: int) -> SpanHops:
        """Measure steps of a tiny model with one layer per process."""
        step = self._steps(f"hops of {num_workers} workers", self._plan.num_hop_rounds)
        tiny = self._folder / f"tiny-{num_workers}"
        write_random(tiny, replace(SMALL.size, layers=num_workers + 1))
        workers = tuple(
            f"{number}:{'output' if number == num_workers else number}"
            for number in range(1, num_workers + 1)
        )
        config = arranged(self._base, tiny, "0:0", *workers)
        with span_group(f"hops-{num_workers}", config, num_workers, self._cores) as group:
            work = Answer(num_requests=1, num_prompt=1, num_tokens=self._plan.num_hops)
            group.anchor.run(work)
            rounds: list[tuple[float, ...]] = []
            for _ in range(self._plan.num_hop_rounds):
                rounds.append(group.anchor.run(work).hop_s)
                step()
        return SpanHops(num_workers=num_workers, rounds_s=tuple(rounds))


@dataclass(frozen=True, slots=True)
class RoundSpeeds:
    """Result of a round: tokens per second by arrangement, with ceilings. `same`: whether each
    divided arrangement gave the answers of one process.
    """

    speeds: dict[str, float]
    same: list[bool]


class Round:
    """A kind of work, done by each arrangement of processes in turn."""

    def __init__(
        self, groups: dict[str, SpanGroup], work: Answer, step: Callable[[], None]
    ) -> None:
        self._groups = groups
        self._work = work
        self._step = step

    def measured(self) -> RoundSpeeds:
        replies = {name: group.anchor.run(self._work) for name, group in self._groups.items()}
        speeds = {name: self._speed(reply) for name, reply in replies.items()}
        for name, ceiling in CEILINGS.items():
            speeds[ceiling] = self._ceiling(self._groups[name], replies[name])
        self._step()
        return RoundSpeeds(
            speeds, [replies[name].answers == replies[ONE].answers for name in CEILINGS]
        )

    @property
    def _is_prefill(self) -> bool:
        return self._work.num_tokens == 1

    def _speed(self, reply: SpanReply) -> float:
        if self._is_prefill:
            return self._work.num_prompt / reply.prefill_s
        return reply.num_decoded / (reply.seconds - reply.prefill_s)

    def _ceiling(self, group: SpanGroup, reply: SpanReply) -> float:
        """Return the tokens per second without communication: all processes compute the steps of
        `reply`, at the same time if steps can overlap, else in turn.
        """
        chosen = [
            number
            for number, extents in enumerate(reply.passes)
            if self._is_prefill or all(stop - start == 1 for _, start, stop in extents)
        ]
        command = Compute(
            passes=tuple(reply.passes[number] for number in chosen),
            draws=tuple(reply.draws[number] for number in chosen),
            row_width=reply.row_width,
        )
        num_rows = sum(stop - start for extents in command.passes for _, start, stop in extents)
        processes = [group.anchor, *group.workers]
        if self._is_prefill or self._work.num_requests > 1:
            return num_rows / max(_seconds_together(processes, command))
        return num_rows / sum(process.run(command).seconds for process in processes)


def _seconds_together(processes: Sequence[SpanProcess], command: Compute) -> list[float]:
    for process in processes:
        process.send(command)
    return [process.receive(SpanReply).seconds for process in processes]


def shortened(work: Answer) -> Answer:
    """Return a shorter version of the work, for warming up."""
    return msgspec.structs.replace(
        work,
        num_prompt=min(work.num_prompt, WARM_UP_PROMPT),
        num_tokens=min(work.num_tokens, WARM_UP_TOKENS),
    )


def usable_cores() -> list[int]:
    """Return the numbers of the cores on which this process may run; [] if unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def halves(num_layers: int) -> tuple[str, str]:
    """Return the spans that divide a model's layers into halves: for 28 layers, `0:13` and
    `14:output`. Raises: BenchError for a model of one layer.
    """
    if num_layers < 2:
        raise BenchError("--spans needs a model of at least two layers")
    middle = num_layers // 2
    return f"0:{middle - 1}", f"{middle}:output"


def divisible_config(context: Context, *own: str) -> FleetConfig:
    """Return the configuration from the options and the additional overrides `own`, with a language
    model's graph if neither names one.

    Raises: ConfigError; BenchError for a graph whose layers cannot be divided.
    """
    given = (*context.options.overrides, *own)
    if context.options.config is None and not any(text.startswith("graph=") for text in given):
        own = (*own, f"graph={GRAPH}")
    config = context.resolve(*own)
    stages = config.graph_declaration().stages
    if len(stages) != 1 or not stages[0].span_builder:
        raise BenchError(
            "--spans needs a graph of one stage whose layers can be divided, and "
            f"{config.graph} is none; add --set graph={GRAPH}",
            param="--spans",
        )
    return config


def arranged(
    base: FleetConfig, checkpoint: Path, *spans: str, kv_pages: int = KV_PAGES
) -> FleetConfig:
    """Return a configuration with one thread per process. `spans`: span of the anchor, then the
    span of each worker; empty for an undivided model.
    """
    stage = base.graph_declaration().stages[0].name
    own = base.stage(stage).model_dump(mode="json")
    own |= {"spans": None, "threads": 1, "max_batch": MAX_BATCH, "kv_pages": kv_pages}
    if spans:
        own["spans"] = {"anchor": spans[0], "workers": list(spans[1:])}
    resolved = {"checkpoint": str(checkpoint), "stages": {stage: own}}
    return FleetConfig.model_validate({**base.model_dump(mode="json"), **resolved})


def write_random(folder: Path, size: SpanModelSize) -> int:
    """Write a random checkpoint and return its number of parameters."""
    # Imported here: it needs torch, which no other measurement does.
    from fleet.models.causal_lm.sized import ModelSize, write_sized_checkpoint

    whole = ModelSize(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.hidden // 64,
        kv_heads=size.kv_heads,
        head_dim=128,
        intermediate=3 * size.hidden,
        vocabulary=size.vocabulary,
    )
    return write_sized_checkpoint(folder, whole) // 4


def num_layers_of(checkpoint: Path) -> int:
    from fleet.models.causal_lm.load import read_config

    return int(read_config(checkpoint).num_hidden_layers)


MEASUREMENT = Measurement(
    place=70,
    key="spans",
    run=measure_spans,
    option="--spans",
    help="measure a model whose layers are divided between processes",
    has_small=True,
    about={
        "--spans": "one model in one process, and its layers divided between two, in either "
        "direction: tokens per second of a long prompt, and of decode at 1 and 32 requests, beside "
        "what both compute without any transfer. A core and a thread per process; without Redis. "
        "Then passes of a tiny model through 1 and 3 span workers. The model is a random one of "
        "254 million parameters unless --set checkpoint= names another; with --small it is tiny"
    },
)
