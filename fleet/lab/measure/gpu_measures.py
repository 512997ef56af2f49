"""The parts of the measurement of a device: copies, answers of all stages, and steps of each stage
by itself.

Knows no model: a stage's steps are measured on the inputs that it had while whole answers were
produced.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from fleet.engine.base import Engine, EngineOutput
from fleet.engine.torch.lm_engine import LMEngine
from fleet.graphs import Graph
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.gpu_result import Prefill, SpeechRun, StageSteps
from fleet.lab.measure.twin import SlowTwin, TwinChunk
from fleet.lab.measure.weight_reads import WeightReads
from fleet.lab.report.stats import median
from fleet.stages.base import BuiltStage
from fleet.stages.full_size import FullSizeModel

NUM_COPIES = 12
SKIPPED_STEPS = 3
"""Steps at the beginning that do not count: they compute the prompts too."""
AUDIO = "audio"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswers:
    """Whole answers: their requests, and every chunk between the stages."""

    specs: tuple[RequestSpec, ...]
    chunks: tuple[TwinChunk, ...]


class DeviceClock:
    """Times work of a device, from the call until the device has finished it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], T]) -> tuple[float, T]:
        """Return the seconds that the work took, and its result."""
        self.synchronize()
        began_s = time.perf_counter()
        result = work()
        self.synchronize()
        return time.perf_counter() - began_s, result

    def release_memory(self) -> None:
        """Return memory that is no longer in use to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_copies(clock: DeviceClock, num_bytes: int) -> float:
    """Return the bytes per second, read and written, of copies of `num_bytes` within the device's
    memory.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    took_s = [clock.timed(lambda: target.copy_(source))[0] for _ in range(NUM_COPIES)]
    return 2 * num_bytes / median(took_s[2:])


def answer(
    model: FullSizeModel, graph: Graph, clock: DeviceClock, specs: Sequence[RequestSpec]
) -> tuple[SpeechRun, RecordedAnswers]:
    """Answer requests that begin together. Raises: BenchError if one fails."""
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
    """One stage on its inputs of a recording, for the first `batch` requests of it, all available
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
        """Submit the requests with all their inputs."""
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
        """Return True for the outputs of a step in which every request drew once, and none
        ended.
        """
        return len({output.request_id for output in outputs}) == len(outputs) == len(
            self._specs
        ) and not any(output.final for output in outputs)

    def steps_s(self, stage: BuiltStage, clock: DeviceClock, num_steps: int) -> list[float]:
        """Return the durations of up to `num_steps` steps in which every request draws. Raises:
        BenchError if there is none.
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
        """Return the bytes of weights, and of keys and values, that a step reads."""
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
    """Run steps while there is work, and yield the duration and the outputs of each. Raises:
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
    """Measure one stage at one batch, as it is served and without a graph."""
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
    """Measure the first step of each request by itself; the first two requests do not count. All
    prompts have equal lengths.
    """
    took_s: list[float] = []
    for spec in specs:
        replay = StageReplay(graph, name, RecordedAnswers(specs=(spec,), chunks=()), 1)
        replay.open(stage)
        took_s.append(next(_steps(stage.engine, clock))[0])
        replay.close(stage.engine)
    return Prefill(rows=len(specs[0].prompt_ids), step_s=tuple(took_s[2:]))
