"""Engine benchmark: the torch engine and vLLM's `LLM.generate`, each in one process, and a fleet on
vLLM.

The engines and the fleet use the same model, prompts and answer length. Differences are therefore
due to the engine, or to the overhead of the fleet around its engine. Takes the stages from the
graph.
"""

from itertools import islice

import msgspec
from rich.console import Group

from fleet.config import FleetConfig
from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from fleet.engine.vllm.start import installed_version
from fleet.lab.client.chat import StageBounds
from fleet.lab.measure.deployment import TargetFleet, own_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import run_phase
from fleet.lab.measure.measurement import BenchOptions, Context, Measurement
from fleet.lab.measure.prompts import pick
from fleet.lab.measure.reference import ReferenceResult, ReferenceWork, run_reference
from fleet.lab.measure.serving import encode_call, prepare
from fleet.lab.measure.split import with_checkpoint
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, OTHER, TWIN, Result
from fleet.lab.report.stats import Ratio, at_least, median
from fleet.lab.report.tables import figure, table_of, titled

TORCH, VLLM, ON_VLLM = "torch engine", "LLM.generate", "fleet on vLLM"
COLORS = {TORCH: TWIN, VLLM: OTHER, ON_VLLM: FLEET}
ENGINES = {TORCH: "torch", VLLM: "vllm"}
BATCHES, FLEET_BATCHES = (1, 8, 32), (8, 32)
NUM_TOKENS = 128
NUM_RUNS = 4
"""Number of runs per batch size; the first one warms up. No prompt occurs in two runs, so that no
run uses another's cached prefixes.
"""
TORCH_TARGET, FLEET_TARGET = 1.0, 0.9


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speed of an engine: runs with `batch` concurrent answers of `num_tokens` tokens in
    total. `seconds`: duration of each run. `others_cores`: mean number of CPU cores used by other
    processes, None if not measured.
    """

    name: str
    batch: int
    num_tokens: int
    seconds: tuple[float, ...]
    others_cores: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / median(self.seconds)


class EngineComparison(Result, frozen=True, kw_only=True):
    """Speed of each engine at each batch size. `num_equal` of `num_answers` answers have the same
    tokens on both engines.
    """

    speeds: tuple[EngineSpeed, ...]
    num_equal: int
    num_answers: int
    num_threads: int

    def tokens_per_s(self, name: str, batch: int) -> float | None:
        return next(
            (
                speed.tokens_per_s
                for speed in self.speeds
                if (speed.name, speed.batch) == (name, batch)
            ),
            None,
        )

    def relative(self, name: str, batch: int) -> float | None:
        """Return an engine's speed at a batch size relative to `LLM.generate`, None if not
        measured.
        """
        own, other = self.tokens_per_s(name, batch), self.tokens_per_s(VLLM, batch)
        return own / other if own and other else None

    @property
    def _batches(self) -> tuple[int, ...]:
        return tuple(sorted({speed.batch for speed in self.speeds}))

    def tables(self) -> list[Group]:
        table = table_of("batch", *COLORS, "torch / LLM", "fleet / LLM")
        for batch in self._batches:
            speeds = (self.tokens_per_s(name, batch) for name in COLORS)
            ratios = (self.relative(name, batch) for name in (TORCH, ON_VLLM))
            table.add_row(f"{batch}", *map(figure, (*speeds, *ratios)))
        same = (
            f"{self.num_equal} of {self.num_answers} answers have the same tokens on both engines"
        )
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return [titled(f"tokens/s, {threads}; {same}", table)]

    def panels(self) -> list[Panel]:
        return [self._draw]

    def targets(self) -> list[Ratio]:
        wanted = [(TORCH, batch, TORCH_TARGET) for batch in self._batches]
        wanted += [(ON_VLLM, batch, FLEET_TARGET) for batch in self._batches]
        return [
            at_least(f"{name} / {VLLM}, batch {batch}", value, target)
            for name, batch, target in wanted
            if (value := self.relative(name, batch)) is not None
        ]

    def background_loads(self) -> list[float | None]:
        return [speed.others_cores for speed in self.speeds]

    def _draw(self, axes: Axes) -> None:
        for name, color in COLORS.items():
            points = [
                (speed.batch, speed.tokens_per_s) for speed in self.speeds if speed.name == name
            ]
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="batch",
            ylabel="tokens/s",
            title="engines, one model",
        )
        axes.legend()


def measure_engines(context: Context) -> EngineComparison:
    """Measure the fleet, then each engine while no fleet runs.

    Raises: ConfigError if vLLM is not installed; BenchError if the graph is not one stage that vLLM
    serves.
    """
    installed_version()
    options, config = context.options, context.resolve()
    stage = _only_stage(config)
    own = (
        "engine=vllm",
        f"stages.{stage}.max_batch={max(BATCHES)}",
        f"stages.{stage}.prefill_chunk_tokens=2048",
        f"stages.{stage}.page_size_tokens=32",
        f"stages.{stage}.vllm.kv_mib=256",
    )
    with own_fleet(options.config, (*own, *with_checkpoint(config, options.overrides))) as target:
        speeds = [_measure_fleet(target, stage, batch, context) for batch in FLEET_BATCHES]
    work = _work(target, options, stage)
    (num_threads,) = work.num_threads
    runs = [batch for batch in BATCHES for _ in range(NUM_RUNS)]
    results: list[ReferenceResult] = []
    for name, engine in ENGINES.items():
        results.append(
            run_reference(
                "fleet.lab.measure.engines_run:run",
                *(target.config, engine, runs, work),
                advance=context.steps(name, len(runs)),
                num_threads=num_threads,
            )
        )
        speeds += _speeds_of(name, results[-1])
    torch, vllm = (result.answers for result in results)
    same = [a.answer_ids == b.answer_ids for a, b in zip(torch, vllm, strict=True)]
    return EngineComparison(
        speeds=tuple(speeds), num_equal=sum(same), num_answers=len(same), num_threads=num_threads
    )


def _only_stage(config: FleetConfig) -> StageName:
    stages = config.graph_declaration().stages
    if len(stages) != 1 or "vllm" not in stages[0].engines:
        raise BenchError(
            f"--engines needs a graph of one stage that vLLM serves, and {config.graph} is "
            "none; add --set graph=text",
            param="--engines",
        )
    return stages[0].name


def _prompts(batch: int, run: int) -> list[str]:
    """Return the prompts of one run, whose first words differ from all other prompts."""
    return [f"{batch}.{run}.{number} {prompt}" for number, prompt in enumerate(pick(batch))]


def _measure_fleet(
    target: TargetFleet, stage: StageName, batch: int, context: Context
) -> EngineSpeed:
    api, model = target.api, target.api.model()
    bounds: StageBounds = {
        stage: {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    }
    step, seconds = context.steps(f"{ON_VLLM}, {batch} at a time", batch * NUM_RUNS), list[float]()
    background_load = BackgroundLoad()
    for run in range(NUM_RUNS):
        bodies = [
            encode_call(model, prompt, target.config, bounds) for prompt in _prompts(batch, run)
        ]
        phase = run_phase(ON_VLLM, api, bodies, batch, step)
        if short := [timing for timing in phase.timings if timing.num_answer_tokens != NUM_TOKENS]:
            raise BenchError(f"an answer has {short[0].num_answer_tokens} tokens, not {NUM_TOKENS}")
        seconds.append(phase.wall_s)
    others_cores = background_load.cores()
    return EngineSpeed(
        name=ON_VLLM,
        batch=batch,
        num_tokens=batch * NUM_TOKENS,
        seconds=tuple(seconds[1:]),
        others_cores=others_cores,
    )


def _work(target: TargetFleet, options: BenchOptions, stage: StageName) -> ReferenceWork:
    """Prepare the requests of all runs, in order, as the gateway would, except that every answer
    has exactly `NUM_TOKENS` tokens.
    """
    prompts = tuple(
        prompt for batch in BATCHES for run in range(NUM_RUNS) for prompt in _prompts(batch, run)
    )
    work, _ = prepare(target, options, prompts, (target.config.stage(stage).threads,))
    return msgspec.structs.replace(work, requests=tuple(map(_of_one_length, work.requests)))


def _of_one_length(spec: RequestSpec) -> RequestSpec:
    replace = msgspec.structs.replace
    sampling = {
        stage: replace(one, max_tokens=NUM_TOKENS, ignore_eos=True)
        for stage, one in spec.sampling.items()
    }
    return replace(spec, sampling=sampling)


def _speeds_of(name: str, result: ReferenceResult) -> list[EngineSpeed]:
    """Return an engine's speed at each batch size from its result, in which each answer has the
    duration of its run.
    """
    answers, speeds = iter(result.answers), list[EngineSpeed]()
    for batch in BATCHES:
        runs = [list(islice(answers, batch)) for _ in range(NUM_RUNS)]
        speeds.append(
            EngineSpeed(
                name=name,
                batch=batch,
                num_tokens=sum(len(answer.answer_ids) for answer in runs[-1]),
                seconds=tuple(run[0].seconds for run in runs[1:]),
                others_cores=result.others_cores,
            )
        )
    return speeds


MEASUREMENT = Measurement(
    place=60,
    key="engines",
    run=measure_engines,
    option="--engines",
    help="compare the torch engine, vLLM, and a fleet on vLLM",
    about={
        "--engines": "tokens per second of the torch engine and of vLLM's LLM.generate, each in "
        "one process, at batch 1, 8 and 32, and of a fleet on vLLM at 8 and 32: greedy answers of "
        "128 tokens. Needs vLLM, and a graph that it serves"
    },
)
