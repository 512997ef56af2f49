"""Steps of one stage by itself, on inputs recorded while whole answers were produced, for the
benchmark of a device. Knows no model.
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
from fleet.lab.measure.gpu import Prefill, StageSteps
from fleet.lab.measure.twin import TwinChunk
from fleet.lab.measure.weight_reads import WeightReads
from fleet.stages.base import BuiltStage
from fleet.stages.full_size import MeasuredStages

SKIPPED_STEPS = 3
"""Number of first steps that do not count, since they also compute prompts."""
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
    stages: MeasuredStages,
    graph: Graph,
    clock: DeviceClock,
    name: StageName,
    recording: RecordedAnswers,
    batch: int,
    num_steps: int,
) -> StageSteps:
    """Measure the steps of one stage at one batch size: as a worker runs them, without a CUDA
    graph, and in invariant numerics.
    """
    built, eager, invariant = (
        stages.built[name],
        stages.eager.get(name),
        stages.invariant.get(name),
    )
    replay = StageReplay(graph, name, recording, batch)
    weight_bytes, kv_bytes = 0, 0
    if isinstance(built.engine, LMEngine):
        weight_bytes, kv_bytes = replay.bytes_read(
            eager or built, WeightReads(stages.weights[name].holds), clock
        )
    return StageSteps(
        stage=name,
        batch=batch,
        served_s=tuple(replay.steps_s(built, clock, num_steps)),
        eager_s=tuple(replay.steps_s(eager, clock, num_steps)) if eager else (),
        invariant_s=tuple(replay.steps_s(invariant, clock, num_steps)) if invariant else (),
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
