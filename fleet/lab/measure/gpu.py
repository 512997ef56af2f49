"""`fleet bench --gpu`: the torch engine on this machine's device, with a model of the published
size and random weights.

Needs no fleet, no checkpoint and no network. Knows no model: the graph declares the builder, and
the builder what is expected.
"""

import resource
import sys
import time
from dataclasses import dataclass
from importlib import import_module

import msgspec
import torch
from rich.console import Console

from fleet.core.request import RequestSpec
from fleet.graphs import DEFAULT_GRAPH, Graph, get_graph
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.gpu_measures import (
    DeviceClock,
    RecordedAnswers,
    answer,
    measure_copies,
    measure_prefill,
    measure_steps,
)
from fleet.lab.measure.gpu_result import (
    GpuResult,
    MemoryUse,
    Prefill,
    PublishedRate,
    SpeechRun,
    StageSteps,
)
from fleet.lab.measure.options import BenchOptions
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import Machine, describe_machine
from fleet.lab.report.progress import Meter, meter
from fleet.lab.report.result import machine_line
from fleet.lab.report.stats import Ratio, at_least, at_most
from fleet.lab.report.tables import print_line, ratio_table
from fleet.stages.full_size import Expected, FullSizeBuilder, FullSizeModel, FullSizeOptions

BATCHES = (1, 8, 32)
MAX_BATCH = max(BATCHES)
KV_PAGES = 512
PREFILL_CHUNK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Amounts of work. Units: `copy_bytes` per copy; `num_frames` of speech and `num_tokens` of
    text an answer.
    """

    copy_bytes: int
    num_singles: int
    num_prompt_rows: int
    num_tokens: int
    num_frames: int
    num_steps: int
    prefill_rows: tuple[int, ...]
    num_prefills: int


FULL = Plan(
    copy_bytes=1 << 30,
    num_singles=5,
    num_prompt_rows=64,
    num_tokens=40,
    num_frames=125,
    num_steps=24,
    prefill_rows=(32, 64, 128, 256),
    num_prefills=7,
)
"""Ten seconds of speech, and a text of about that length. More than four windows of speech, so that
whole ones remain to be measured.
"""
SMALL = Plan(
    copy_bytes=1 << 24,
    num_singles=2,
    num_prompt_rows=32,
    num_tokens=12,
    num_frames=101,
    num_steps=4,
    prefill_rows=(32, 64),
    num_prefills=4,
)


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `command`: its arguments; `began`: local time, ISO 8601."""

    began: str
    command: tuple[str, ...]
    machine: Machine
    gpu: GpuResult


class GpuFile(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file of a report. `met`: by name of the target."""

    met: dict[str, bool]
    report: GpuReport


def perform(options: BenchOptions, args: list[str]) -> bool:
    """Measure, show and write the report; return True if no target was missed.

    Raises: BenchError without a GPU that can hold the model, unless the small size was requested.
    """
    if not options.small and not torch.cuda.is_available():
        raise BenchError(
            "--gpu: no CUDA device is available here; --small runs the same on the CPU at a "
            "small size",
            param="--gpu",
        )
    began, machine = time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_machine()
    device = torch.device("cpu" if options.small else "cuda")
    try:
        with meter("fleet bench") as progress:
            result = measure(device, progress, small=options.small)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise BenchError(
            f"--gpu: the model does not fit into the device's memory ({reason}); it needs 80 GB"
        ) from error
    report = GpuReport(began=began, command=tuple(args), machine=machine, gpu=result)
    show(report, Console())
    if options.json:
        write_json(
            GpuFile(met={ratio.name: ratio.met for ratio in result.ratios}, report=report),
            options.json,
        )
    return all(ratio.met for ratio in result.ratios)


def show(report: GpuReport, console: Console) -> None:
    print_line(console, machine_line(report.machine))
    for table in report.gpu.tables():
        console.print(table, highlight=False)
    if report.gpu.ratios:
        console.print(ratio_table(report.gpu.ratios))


def measure(device: torch.device, progress: Meter, *, small: bool) -> GpuResult:
    """Measure everything. Raises: BenchError."""
    graph, plan, clock = get_graph(DEFAULT_GRAPH), SMALL if small else FULL, DeviceClock(device)
    copy_bytes_per_s = measure_copies(clock, plan.copy_bytes)
    clock.release_memory()
    began_s = time.perf_counter()
    model = _build(graph, device, progress, small=small)
    clock.synchronize()
    build_s = time.perf_counter() - began_s
    run = _GpuRun(model, graph, clock, plan)
    warm_up_s = run.warm_up(progress)
    singles = run.single_answers(progress)
    together, recording = run.answers_together(progress)
    result = GpuResult(
        model=model.name,
        small=small,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        dtype=_dtype(device),
        build_s=build_s,
        warm_up_s=warm_up_s,
        copy_bytes_per_s=copy_bytes_per_s,
        singles=singles,
        together=together,
        steps=run.steps(recording, progress),
        prefills=run.prefills(progress),
        published=tuple(
            PublishedRate(concurrency=n, audio_s_per_s=v)
            for n, v in model.published.audio_s_per_s.items()
        ),
        published_source=model.published.source,
        memory=_memory(model, device),
    )
    return (
        result
        if small
        else msgspec.structs.replace(result, ratios=ratios_of(result, model.expected))
    )


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _build(graph: Graph, device: torch.device, progress: Meter, *, small: bool) -> FullSizeModel:
    """Build the model of the graph. Raises: BenchError if the graph declares no full size."""
    if graph.full_size is None:
        raise BenchError(f"--gpu: graph {graph.name} declares no full size")
    module, _, function = graph.full_size.partition(":")
    builder: FullSizeBuilder = getattr(import_module(module), function)
    return builder(
        FullSizeOptions(
            device=device.type,
            dtype=_dtype(device),
            small=small,
            max_batch=MAX_BATCH,
            kv_pages=KV_PAGES,
            prefill_chunk_tokens=PREFILL_CHUNK,
            on_built=progress.steps("stages with random weights", len(graph.stages)),
        )
    )


class _GpuRun:
    """The measurements of a built model, in the order of the methods."""

    def __init__(self, model: FullSizeModel, graph: Graph, clock: DeviceClock, plan: Plan) -> None:
        self._model, self._graph, self._clock, self._plan = model, graph, clock, plan

    def warm_up(self, progress: Meter) -> float:
        """Answer as later on, unmeasured: memory is allocated, kernels are chosen and graphs are
        captured. Return the seconds.
        """
        done, began_s = progress.steps("warm-up", 2), time.perf_counter()
        for batch in (1, MAX_BATCH):
            self._answer(batch)
            done()
        return time.perf_counter() - began_s

    def single_answers(self, progress: Meter) -> tuple[SpeechRun, ...]:
        done = progress.steps("answers, one at a time", self._plan.num_singles)
        runs: list[SpeechRun] = []
        for _ in range(self._plan.num_singles):
            runs.append(self._answer(1)[0])
            done()
        return tuple(runs)

    def answers_together(self, progress: Meter) -> tuple[SpeechRun, RecordedAnswers]:
        done = progress.steps(f"{MAX_BATCH} answers together", 1)
        measured = self._answer(MAX_BATCH)
        done()
        return measured

    def steps(self, recording: RecordedAnswers, progress: Meter) -> tuple[StageSteps, ...]:
        done = progress.steps("steps of each stage", len(self._graph.stages) * len(BATCHES))
        measured: list[StageSteps] = []
        for stage in self._graph.stages:
            for batch in BATCHES:
                num_steps = self._plan.num_steps
                measured.append(
                    measure_steps(
                        self._model,
                        self._graph,
                        self._clock,
                        stage.name,
                        recording,
                        batch,
                        num_steps,
                    )
                )
                done()
        return tuple(measured)

    def prefills(self, progress: Meter) -> tuple[Prefill, ...]:
        done = progress.steps("prefill", len(self._plan.prefill_rows))
        main = next(stage.name for stage in self._graph.stages if stage.main)
        measured: list[Prefill] = []
        for rows in self._plan.prefill_rows:
            specs = self._requests(self._plan.num_prefills, rows)
            measured.append(
                measure_prefill(self._model.built[main], self._graph, main, self._clock, specs)
            )
            done()
        return tuple(measured)

    def _answer(self, batch: int) -> tuple[SpeechRun, RecordedAnswers]:
        specs = self._requests(batch, self._plan.num_prompt_rows)
        return answer(self._model, self._graph, self._clock, specs)

    def _requests(self, count: int, num_prompt_rows: int) -> list[RequestSpec]:
        plan = self._plan
        return [
            self._model.request(
                number,
                num_prompt_rows=num_prompt_rows,
                num_tokens=plan.num_tokens,
                num_frames=plan.num_frames,
            )
            for number in range(count)
        ]


def _memory(model: FullSizeModel, device: torch.device) -> MemoryUse:
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_reserved(device)
    else:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    weight_bytes = {name: reader.num_bytes for name, reader in model.weights.items()}
    return MemoryUse(
        weight_bytes=weight_bytes, peak_bytes=peak_bytes, is_device=device.type == "cuda"
    )


def ratios_of(result: GpuResult, expected: Expected) -> tuple[Ratio, ...]:
    """Return the numbers that have an expectation."""
    ratios: list[Ratio] = []
    for name, target in expected.graph_gain.items():
        gain = result.steps_of(name)[1].graph_gain
        if gain is not None:
            ratios.append(at_least(f"{name}, 1 request: eager / graph", gain, target))
    for name, target in expected.batch_cost.items():
        by_batch = result.steps_of(name)
        cost = by_batch[MAX_BATCH].served_ms / by_batch[1].served_ms
        ratios.append(at_most(f"{name}, {MAX_BATCH} requests / 1", cost, target))
    for name, target in expected.bytes_time.items():
        for batch, each in result.steps_of(name).items():
            times = each.bytes_time(result.copy_bytes_per_s)
            if times is not None:
                row = f"{name}, {batch} request{'s' if batch > 1 else ''}: step / copy of its bytes"
                ratios.append(at_most(row, times, target))
    audio_ms = result.first_audio_ms
    return (
        *ratios,
        at_most("first audio", audio_ms, expected.first_audio_ms, "ms"),
    )
