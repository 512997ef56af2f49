"""Choice of a stage's device and precision, as its numerics require."""

from dataclasses import dataclass

import torch

from fleet.core.errors import ConfigError
from fleet.engine.torch.experts import Experts, grouped_experts, tiled_experts
from fleet.graphs.base import FP8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype of hidden states, keys and values in a precision that a configuration names:
    one of `DTYPES`, or `FP8`.
    """
    return DTYPES["bfloat16" if name == FP8 else name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """Device and precision at which a stage computes. `tiled`: True if rows are computed in tiles
    of fixed size (numerics invariant). `fp8_experts`: True if the weights of experts are held in
    8-bit floating point.
    """

    device: torch.device
    dtype: torch.dtype
    tiled: bool
    fp8_experts: bool = False

    @property
    def experts(self) -> Experts:
        return tiled_experts if self.tiled else grouped_experts


def open_device(*, device: str, dtype: str, numerics: str, threads: int) -> ComputeDevice:
    """Set the number of the process's CPU threads and return the stage's device and precision.
    Raises: ConfigError naming settings that exclude each other.
    """
    if dtype not in (*DTYPES, FP8):
        known = ", ".join((*DTYPES, FP8))
        raise ConfigError(f"dtype: {dtype!r} is not one of {known}", param="dtype")
    if numerics == "invariant" and (device != "cpu" or dtype != "float32"):
        raise ConfigError(
            f"numerics: invariant needs device cpu and dtype float32, not {device} and {dtype}",
            param="numerics",
        )
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {device!r} cannot be used: {error}", param="device") from error
    if where.type == "cpu":
        torch.set_num_threads(threads)
    return ComputeDevice(
        device=where,
        dtype=compute_dtype(dtype),
        tiled=numerics == "invariant",
        fp8_experts=dtype == FP8,
    )
