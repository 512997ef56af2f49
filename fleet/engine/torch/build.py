"""Assembly of a batch loop from a program: pool, runner and limits, as the numerics require."""

from dataclasses import dataclass
from typing import Literal

import torch

from fleet.core.errors import ConfigError
from fleet.engine.torch.experts import Experts, grouped_experts, tiled_experts
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.passes import FastRunner, PassRunner, TileRunner
from fleet.engine.torch.program import Program, TaskT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """A stage's device and precision. `tiled`: rows in fixed tiles (numerics invariant)."""

    device: torch.device
    dtype: torch.dtype
    tiled: bool

    @property
    def experts(self) -> Experts:
        return tiled_experts if self.tiled else grouped_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    num_pages: int
    page_size: int

    @property
    def num_positions(self) -> int:
        return self.num_pages * self.page_size


def open_device(*, device: str, dtype: str, numerics: str | Literal["fast", "invariant"], threads: int) -> ComputeDevice:
    """Set the process's threads and choose the device. Raises: ConfigError naming settings that exclude each other."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}", param="dtype")
    if numerics == "invariant" and (device != "cpu" or dtype != "float32"):
        raise ConfigError(f"numerics: invariant needs device cpu and dtype float32, not {device} and {dtype}", param="numerics")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {device!r} cannot be used: {error}", param="device") from error
    if where.type == "cpu":
        torch.set_num_threads(threads)
    return ComputeDevice(device=where, dtype=DTYPES[dtype], tiled=numerics == "invariant")


def build_loop(program: Program[TaskT], where: ComputeDevice, pool_limits: PoolLimits, limits: LoopLimits) -> LMEngine[TaskT]:
    pool = KVPool(
        program.kv_shape,
        num_pages=pool_limits.num_pages,
        page_size=pool_limits.page_size,
        dtype=where.dtype,
        device=where.device,
    )
    runner: PassRunner[TaskT] = TileRunner(program, pool) if where.tiled else FastRunner(program, pool)
    return LMEngine(program, pool, runner, limits)
