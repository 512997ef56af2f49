"""Choice of a stage's device and precision, as its numerics require."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from fleet.core.errors import ConfigError
from fleet.engine.torch.experts import Experts, grouped_experts, tiled_experts
from fleet.graphs.base import FP8

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which a GPU multiplies bfloat16."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype of hidden states, keys and values in a precision that a configuration names:
    one of `DTYPES`, or `FP8`.
    """
    return DTYPES["bfloat16" if name == FP8 else name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """Device and precision at which a stage computes. `tiled`: True if rows are computed in tiles
    of fixed size (numerics invariant): by fused kernels on a GPU, in calls of as many rows on a
    CPU. `fp8_experts`: True if the weights of experts are held in 8-bit floating point.
    """

    device: torch.device
    dtype: torch.dtype
    tiled: bool
    fp8_experts: bool = False

    @property
    def experts(self) -> Experts:
        return tiled_experts if self.tiled else grouped_experts

    @property
    def needs_kernels(self) -> bool:
        """True if only fused kernels may compute a step."""
        return self.tiled and self.device.type == "cuda"


def open_device(*, device: str, dtype: str, numerics: str, threads: int) -> ComputeDevice:
    """Set the number of the process's CPU threads and return the stage's device and precision.
    Raises: ConfigError if the device cannot be used, or not with these numerics.
    """
    if dtype not in (*DTYPES, FP8):
        known = ", ".join((*DTYPES, FP8))
        raise ConfigError(f"dtype: {dtype!r} is not one of {known}", param="dtype")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {device!r} cannot be used: {error}", param="device") from error
    if where.type == "cpu":
        torch.set_num_threads(threads)
    opened = ComputeDevice(
        device=where,
        dtype=compute_dtype(dtype),
        tiled=numerics == "invariant",
        fp8_experts=dtype == FP8,
    )
    if opened.needs_kernels:
        _prepare_for_kernels(where)
    return opened


def _prepare_for_kernels(device: torch.device) -> None:
    """Let the library's convolutions use only algorithms that add in one order. Raises: ConfigError
    if the device cannot run the fused kernels.
    """
    missing = None if find_spec("triton") else "Triton, which comes with torch for CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        missing = f"compute capability 8.0, and {device} has {major}.{minor}"
    if missing is not None:
        raise ConfigError(
            f"numerics: invariant on a GPU needs {missing}; set device: cpu, or numerics: fast",
            param="numerics",
        )
    torch.backends.cudnn.deterministic = True
