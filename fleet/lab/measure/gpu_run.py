"""Benchmark of a device: memory copies, answers of all stages, and steps of each stage by itself.

Knows no model: each stage's steps are measured on inputs recorded while whole answers were
produced.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import msgspec
import torch

from fleet.core.request import RequestSpec
from fleet.graphs import DEFAULT_GRAPH, Graph, get_graph
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.gpu import (
    GpuResult,
    MeasuredChoice,
    MemoryUse,
    Prefill,
    PublishedRate,
    SpeechRun,
    StageSteps,
)
from fleet.lab.measure.gpu_steps import (
    DeviceClock,
    RecordedAnswers,
    measure_prefill,
    measure_steps,
)
from fleet.lab.measure.measurement import Context
from fleet.lab.measure.twin import SlowTwin
from fleet.lab.report.stats import Ratio, at_least, at_most, median
from fleet.stages.full_size import (
    Expected,
    FullSizeBuilder,
    FullSizeModel,
    FullSizeOptions,
    MeasuredStages,
)

BATCHES = (1, 8, 32)
MAX_BATCH = max(BATCHES)
KV_PAGES = 512
PREFILL_CHUNK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Amounts of work of the benchmark. Units: `copy_bytes` per copy; `num_frames` of speech and
    `num_tokens` of text per answer.
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
    prefill_rows=(32, 64, 128, 256, 512),
    num_prefills=7,
)
"""Amounts of work at the full size: ten seconds of speech and about as much text. The speech has
more than four windows, so that whole windows remain to be measured.
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


NUM_COPIES = 12
AUDIO = "audio"


def measure_copies(clock: DeviceClock, num_bytes: int) -> float:
    """Return the bandwidth of copies of `num_bytes` within the device's memory, in bytes read and
    written per second.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    took_s = [clock.timed(lambda: target.copy_(source))[0] for _ in range(NUM_COPIES)]
    return 2 * num_bytes / median(took_s[2:])


def answer(
    model: FullSizeModel, graph: Graph, clock: DeviceClock, specs: Sequence[RequestSpec]
) -> tuple[SpeechRun, RecordedAnswers]:
    """Compute the answers to requests that begin together, and record their chunks. Raises:
    BenchError if a request fails.
    """
    twin = SlowTwin(graph, model.stages.built)
    seconds, chunks = clock.timed(lambda: list(twin.stream(specs)))
    if twin.errors:
        error = next(iter(twin.errors.values()))
        raise BenchError(f"--gpu: a request failed ({error}); the log has the cause")
    released = [chunk for chunk in chunks if graph.media.get(chunk.edge) == AUDIO and chunk.arrays]
    first_s = {chunk.request: chunk.at_s for chunk in reversed(released)}
    num_samples = sum(array.size for chunk in released for array in chunk.arrays.values())
    run = SpeechRun(
        concurrency=len(specs),
        first_audio_s=tuple(first_s[spec.id] for spec in specs),
        seconds=seconds,
        audio_s=num_samples / model.sample_rate_hz,
    )
    return run, RecordedAnswers(specs=tuple(specs), chunks=tuple(chunks))


def measure_device(context: Context) -> GpuResult:
    """Measure this machine's GPU, or the CPU at the small size.

    Raises: BenchError without a GPU that can hold the model, unless the small size was requested.
    """
    small = context.options.small
    if not small and not torch.cuda.is_available():
        raise BenchError(
            "--gpu: no CUDA device is available here; --small runs the same on the CPU at a "
            "small size",
            param="--gpu",
        )
    try:
        return measure(torch.device("cpu" if small else "cuda"), context, small=small)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise BenchError(
            f"--gpu: the model does not fit into the device's memory ({reason}); it needs 80 GB"
        ) from error


def measure(device: torch.device, context: Context, *, small: bool) -> GpuResult:
    """Run the whole benchmark on a device. Raises: BenchError."""
    graph, plan, clock = get_graph(DEFAULT_GRAPH), SMALL if small else FULL, DeviceClock(device)
    copy_bytes_per_s = measure_copies(clock, plan.copy_bytes)
    clock.release_memory()
    began_s = time.perf_counter()
    model = _build(graph, device, context, small=small)
    clock.synchronize()
    build_s = time.perf_counter() - began_s
    run = _GpuRun(model, graph, clock, plan)
    warm_up_s = run.warm_up(context)
    singles = run.single_answers(context)
    together, recording = run.answers_together(context)
    measured, memory = run.steps(recording, context), _memory(model, device)
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
        steps=measured,
        prefills=run.prefills(context),
        choices=tuple(MeasuredChoice(**row._asdict()) for row in model.measured()),
        published=tuple(
            PublishedRate(concurrency=n, audio_s_per_s=v)
            for n, v in model.published.audio_s_per_s.items()
        ),
        published_source=model.published.source,
        memory=memory,
    )
    expected, build_rounded = model.expected, model.rounded
    # the same stages in 8 bits need the memory
    del model, run
    rounded = measure_rounded(build_rounded, graph, clock, recording, plan.num_steps, context)
    result = msgspec.structs.replace(result, rounded=rounded)
    return result if small else msgspec.structs.replace(result, ratios=ratios_of(result, expected))


def measure_rounded(
    build: Callable[[], MeasuredStages],
    graph: Graph,
    clock: DeviceClock,
    recording: RecordedAnswers,
    num_steps: int,
    context: Context,
) -> tuple[StageSteps, ...]:
    """Build the stages with experts in 8 bits, and measure their steps."""
    clock.release_memory()
    stages = build()
    done = context.steps("steps with experts in 8 bits", len(stages.built) * len(BATCHES))
    measured: list[StageSteps] = []
    for name in stages.built:
        for batch in BATCHES:
            measured.append(measure_steps(stages, graph, clock, name, recording, batch, num_steps))
            done()
    return tuple(measured)


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _build(graph: Graph, device: torch.device, context: Context, *, small: bool) -> FullSizeModel:
    """Build the model of the graph with random weights. Raises: BenchError if the graph declares no
    full size.
    """
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
            on_built=context.steps("stages with random weights", len(graph.stages)),
        )
    )


class _GpuRun:
    """Measurements of a built model, to be called in the order of the methods."""

    def __init__(self, model: FullSizeModel, graph: Graph, clock: DeviceClock, plan: Plan) -> None:
        self._model = model
        self._graph = graph
        self._clock = clock
        self._plan = plan

    def warm_up(self, context: Context) -> float:
        """Produce answers once, unmeasured, so that memory is allocated, kernels are chosen and
        CUDA graphs are captured. Return the duration in seconds.
        """
        done, began_s = context.steps("warm-up", 2), time.perf_counter()
        for batch in (1, MAX_BATCH):
            self._answer(batch)
            done()
        return time.perf_counter() - began_s

    def single_answers(self, context: Context) -> tuple[SpeechRun, ...]:
        done = context.steps("answers, one at a time", self._plan.num_singles)
        runs: list[SpeechRun] = []
        for _ in range(self._plan.num_singles):
            runs.append(self._answer(1)[0])
            done()
        return tuple(runs)

    def answers_together(self, context: Context) -> tuple[SpeechRun, RecordedAnswers]:
        done = context.steps(f"{MAX_BATCH} answers together", 1)
        measured = self._answer(MAX_BATCH)
        done()
        return measured

    def steps(self, recording: RecordedAnswers, context: Context) -> tuple[StageSteps, ...]:
        done = context.steps("steps of each stage", len(self._graph.stages) * len(BATCHES))
        measured: list[StageSteps] = []
        for stage in self._graph.stages:
            for batch in BATCHES:
                num_steps = self._plan.num_steps
                measured.append(
                    measure_steps(
                        self._model.stages,
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

    def prefills(self, context: Context) -> tuple[Prefill, ...]:
        done = context.steps("prefill", len(self._plan.prefill_rows))
        main = next(stage.name for stage in self._graph.stages if stage.main)
        measured: list[Prefill] = []
        for rows in self._plan.prefill_rows:
            specs = self._requests(self._plan.num_prefills, rows)
            measured.append(
                measure_prefill(
                    self._model.stages.built[main], self._graph, main, self._clock, specs
                )
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
    weight_bytes = {name: reader.num_bytes for name, reader in model.stages.weights.items()}
    return MemoryUse(
        weight_bytes=weight_bytes, peak_bytes=peak_bytes, is_device=device.type == "cuda"
    )


def ratios_of(result: GpuResult, expected: Expected) -> tuple[Ratio, ...]:
    """Return the results for which `expected` has a value, with their targets."""
    ratios: list[Ratio] = []
    for (name, batch), target in expected.step_ms.items():
        row = f"{name}, {_requests(batch)}: step"
        ratios.append(at_most(row, result.steps_of(name)[batch].served_ms, target, "ms"))
    for prefill in result.prefills:
        if prefill.rows in expected.prefill_ms:
            target = expected.prefill_ms[prefill.rows]
            row = f"prompt of {prefill.rows} positions"
            ratios.append(at_most(row, prefill.step_ms, target, "ms"))
    ratios.append(at_most("first audio", result.first_audio_ms, expected.first_audio_ms, "ms"))
    for (name, batch), target in expected.invariant_share.items():
        share = result.steps_of(name)[batch].invariant_share
        if share is not None:
            row = f"{name}, {_requests(batch)}: speed of invariant numerics"
            ratios.append(at_least(row, share, target, ""))
    for concurrency, target in expected.audio_s_per_s.items():
        row = f"audio seconds per second, {concurrency} together"
        ratios.append(at_least(row, result.audio_rate(concurrency), target, ""))
    return tuple(ratios)


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"
