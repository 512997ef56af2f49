"""Common parts of the builders of autoregressive stages: device, checkpoint, batch loop, end ids."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleet.core.errors import ConfigError
from fleet.engine.torch.build import ComputeDevice, open_device
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to, can_capture
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.passes import FastRunner, PassRunner, TileRunner
from fleet.engine.torch.program import GraphProgram, GraphTaskT, Program, TaskT
from fleet.models.checkpoint import CheckpointReader
from fleet.processing.end_ids import read_end_ids
from fleet.stages.base import BuildOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """A stage's options, checked, and its device. `num_positions`: capacity of its KV pool."""

    options: BuildOptions
    where: ComputeDevice

    @property
    def num_positions(self) -> int:
        return self.options.kv_pages * self.options.page_size_tokens

    def reader(self, is_read: Callable[[str], bool]) -> CheckpointReader:
        """Open the checkpoint. `is_read` returns True for the names of the weights that the stage reads."""
        reader = CheckpointReader(self.options.checkpoint, device=self.where.device, dtype=self.where.dtype)
        reader.report_to(self.options.progress, [name for name in reader.under("") if is_read(name)])
        return reader

    def loop(self, program: Program[TaskT]) -> LMEngine[TaskT]:
        pool = self._pool(program)
        runner: PassRunner[TaskT] = TileRunner(program, pool) if self.where.tiled else FastRunner(program, pool)
        return LMEngine(program, pool, runner, self._limits)

    def graph_loop(self, program: GraphProgram[GraphTaskT], *, on_cpu: bool = False) -> LMEngine[GraphTaskT]:
        """Return the loop of a program whose decode step is a graph, captured where the device can.

        With `on_cpu`, a CPU runs the operations of the graph one by one.
        """
        runs_one_by_one = on_cpu and self.where.device.type == "cpu"
        if not (runs_one_by_one or can_capture(self.where.device, self.where.dtype)):
            return self.loop(program)
        pool = self._pool(program)
        runner = GraphRunner(program, pool, buckets_up_to(self.options.max_batch))
        return LMEngine(program, pool, runner, self._limits)

    @property
    def _limits(self) -> LoopLimits:
        return LoopLimits(max_batch=self.options.max_batch, prefill_chunk_tokens=self.options.prefill_chunk_tokens)

    def _pool(self, program: Program[TaskT]) -> KVPool:
        return KVPool(
            program.kv_shape,
            num_pages=self.options.kv_pages,
            page_size=self.options.page_size_tokens,
            dtype=self.where.dtype,
            device=self.where.device,
        )


def prepare_stage(options: BuildOptions) -> StageSetup:
    """Check a stage's options and open its device. Raises: ConfigError."""
    where = open_device(device=options.device, dtype=options.dtype, numerics=options.numerics, threads=options.threads)
    return StageSetup(options=options, where=where)


def end_ids_of(folder: Path) -> frozenset[int]:
    """Return the ids that end an answer. Raises: ConfigError if there are none."""
    found = read_end_ids(folder)
    if not found:
        raise ConfigError(f"checkpoint {folder}: names no eos_token_id", param="checkpoint")
    return found
