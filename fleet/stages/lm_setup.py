"""Common parts of the builders of autoregressive stages: device, checkpoint, batch loop, end ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleet.core.errors import ConfigError
from fleet.engine.torch.build import ComputeDevice, PoolLimits, build_loop, open_device
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.program import Program, ProgramTask
from fleet.models.checkpoint import WeightReader
from fleet.processing.end_ids import read_end_ids
from fleet.stages.base import BuildOptions

TaskT = TypeVar("TaskT", bound=ProgramTask)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """A stage's device, checkpoint folder and limits, checked."""

    folder: Path
    where: ComputeDevice
    pool: PoolLimits
    limits: LoopLimits

    def reader(self) -> WeightReader:
        return WeightReader(self.folder, device=self.where.device, dtype=self.where.dtype)

    def loop(self, program: Program[TaskT]) -> LMEngine[TaskT]:
        return build_loop(program, self.where, self.pool, self.limits)


def prepare_stage(options: BuildOptions) -> StageSetup:
    """Check a stage's options and open its device. Raises: ConfigError."""
    where = open_device(device=options.device, dtype=options.dtype, numerics=options.numerics, threads=options.threads)
    return StageSetup(
        folder=options.checkpoint,
        where=where,
        pool=PoolLimits(num_pages=options.kv_pages, page_size=options.page_size_tokens),
        limits=LoopLimits(max_batch=options.max_batch, prefill_chunk_tokens=options.prefill_chunk_tokens),
    )


def end_ids_of(folder: Path) -> frozenset[int]:
    """Return the ids that end an answer. Raises: ConfigError if there are none."""
    found = read_end_ids(folder)
    if not found:
        raise ConfigError(f"checkpoint {folder}: names no eos_token_id", param="checkpoint")
    return found
