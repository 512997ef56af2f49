"""Benchmark of a device: memory copies, answers of all stages, and steps of each stage by itself.

Knows no model: each stage's steps are measured on inputs recorded while whole answers were
produced.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

import msgspec
import torch

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from fleet.engine.base import Engine, EngineOutput
from fleet.engine.torch.lm_engine import LMEngine
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
from fleet.lab.measure.measurement import Context
from fleet.lab.measure.twin import SlowTwin, TwinChunk
from fleet.lab.measure.weight_reads import WeightReads
from fleet.lab.report.stats import Ratio, at_least, at_most, median
from fleet.stages.base import BuiltStage
from fleet.stages.full_size import Expected, FullSizeBuilder, FullSizeModel, FullSizeOptions

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
SKIPPED_STEPS = 3
"""Number of first steps that do not count, since they also compute prompts."""
AUDIO = "audio"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswers:
    """Recording of whole answers: their requests, and every chunk between the stages."""

    specs: tuple[RequestSpec, ...]
    chunks: tuple[TwinChunk, ...]


class DeviceClock:
    """Times work on a device, from the call until the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], T]) -> tuple[float, T]:
        """Return the duration of the work in seconds, and its result."""
        self.synchronize()
        began_s = time.perf_counter()
        result = work()
        self.synchronize()
        return time.perf_counter() - began_s, result

    def release_memory(self) -> None:
        """Return unused cached memory to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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
    twin = SlowTwin(graph, model.built)
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


class StageReplay:
    """Replay of a recording's first `batch` requests on a single stage; all inputs are available
    from the beginning.
    """

    def __init__(
        self, graph: Graph, name: StageName, recording: RecordedAnswers, batch: int
    ) -> None:
        self._specs = recording.specs[:batch]
        incoming = {edge.name for edge in graph.edges_to(name)}
        self._chunks = {
            spec.id: [
                chunk
                for chunk in recording.chunks
                if chunk.request == spec.id and chunk.edge in incoming
            ]
            for spec in self._specs
        }

    def open(self, stage: BuiltStage) -> None:
        """Submit the requests with all their inputs to the stage."""
        for spec in self._specs:
            adapter = stage.adapter(spec, None)
            request, pieces = adapter.open()
            stage.engine.submit(request)
            consumed = (
                adapter.consume(each.edge, each.walk, each.arrays, final=each.final)
                for each in self._chunks[spec.id]
            )
            for piece in (*pieces, *(piece for some in consumed for piece in some)):
                stage.engine.feed(spec.id, piece)

    def close(self, engine: Engine) -> None:
        for spec in self._specs:
            engine.abort(spec.id)

    def is_whole(self, outputs: Sequence[EngineOutput]) -> bool:
        """Return True if, according to a step's outputs, every request sampled once and none
        ended.
        """
        return len({output.request_id for output in outputs}) == len(outputs) == len(
            self._specs
        ) and not any(output.final for output in outputs)

    def steps_s(self, stage: BuiltStage, clock: DeviceClock, num_steps: int) -> list[float]:
        """Return the latencies of up to `num_steps` steps in which every request samples. Raises:
        BenchError if there is no such step.
        """
        self.open(stage)
        took_s: list[float] = []
        for step_s, outputs in _steps(stage.engine, clock):
            if self.is_whole(outputs):
                took_s.append(step_s)
            if len(took_s) == num_steps + SKIPPED_STEPS:
                break
        self.close(stage.engine)
        if len(took_s) <= SKIPPED_STEPS:
            raise BenchError(
                f"--gpu: only {len(took_s)} steps had all {len(self._specs)} requests; answers "
                "must be longer"
            )
        return took_s[SKIPPED_STEPS:]

    def bytes_read(
        self, stage: BuiltStage, reads: WeightReads, clock: DeviceClock
    ) -> tuple[int, int]:
        """Return the bytes of weights and of KV cache that one step reads."""
        engine = stage.engine
        assert isinstance(engine, LMEngine)
        self.open(stage)
        for _ in zip(range(SKIPPED_STEPS), _steps(engine, clock), strict=False):
            pass
        with reads:
            engine.step()
        kv_bytes = engine.stats().kv.pages_used * engine.pool.page_bytes
        self.close(engine)
        return reads.num_bytes, kv_bytes


def _steps(engine: Engine, clock: DeviceClock) -> Iterator[tuple[float, Sequence[EngineOutput]]]:
    """Run steps while there is work; yield the latency and the outputs of each step. Raises:
    BenchError if a request fails.
    """
    while engine.is_ready():
        step_s, outputs = clock.timed(engine.step)
        for output in outputs:
            if output.error is not None:
                raise BenchError(f"--gpu: a step failed ({output.error}); the log has the cause")
        yield step_s, outputs


def measure_steps(
    model: FullSizeModel,
    graph: Graph,
    clock: DeviceClock,
    name: StageName,
    recording: RecordedAnswers,
    batch: int,
    num_steps: int,
) -> StageSteps:
    """Measure the steps of one stage at one batch size, as a worker runs them and without a CUDA
    graph.
    """
    built, eager = model.built[name], model.eager.get(name)
    replay = StageReplay(graph, name, recording, batch)
    weight_bytes, kv_bytes = 0, 0
    if isinstance(built.engine, LMEngine):
        weight_bytes, kv_bytes = replay.bytes_read(
            eager or built, WeightReads(model.weights[name].holds), clock
        )
    return StageSteps(
        stage=name,
        batch=batch,
        served_s=tuple(replay.steps_s(built, clock, num_steps)),
        eager_s=tuple(replay.steps_s(eager, clock, num_steps)) if eager else (),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


def measure_prefill(
    stage: BuiltStage,
    graph: Graph,
    name: StageName,
    clock: DeviceClock,
    specs: Sequence[RequestSpec],
) -> Prefill:
    """Measure the first step of each request alone. The first two requests warm up. All prompts
    have equal lengths.
    """
    took_s: list[float] = []
    for spec in specs:
        replay = StageReplay(graph, name, RecordedAnswers(specs=(spec,), chunks=()), 1)
        replay.open(stage)
        took_s.append(next(_steps(stage.engine, clock))[0])
        replay.close(stage.engine)
    return Prefill(rows=len(specs[0].prompt_ids), step_s=tuple(took_s[2:]))


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
        steps=run.steps(recording, context),
        prefills=run.prefills(context),
        choices=tuple(MeasuredChoice(**row._asdict()) for row in model.measured()),
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

    def prefills(self, context: Context) -> tuple[Prefill, ...]:
        done = context.steps("prefill", len(self._plan.prefill_rows))
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
    """Return the results for which `expected` has a value, with their targets."""
    ratios: list[Ratio] = []
    for (name, batch), target in expected.step_ms.items():
        row = f"{name}, {batch} request{'s' if batch > 1 else ''}: step"
        ratios.append(at_most(row, result.steps_of(name)[batch].served_ms, target, "ms"))
    for prefill in result.prefills:
        if prefill.rows in expected.prefill_ms:
            target = expected.prefill_ms[prefill.rows]
            row = f"prompt of {prefill.rows} positions"
            ratios.append(at_most(row, prefill.step_ms, target, "ms"))
    ratios.append(at_most("first audio", result.first_audio_ms, expected.first_audio_ms, "ms"))
    for concurrency, target in expected.audio_s_per_s.items():
        row = f"audio seconds per second, {concurrency} together"
        ratios.append(at_least(row, result.audio_rate(concurrency), target, ""))
    return tuple(ratios)
