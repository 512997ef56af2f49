"""The kernels of few rows compile for an H200, on a machine without one, at published sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fleet.engine.torch.kernels.routed_experts_triton import (
    launch_combine,
    launch_down,
    launch_gate_up,
    launch_route,
)
from fleet.engine.torch.kernels.row_product_triton import launch_row_product

H200 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""Shared memory that a program may have."""
ALIGNED = 16
"""Addresses and numbers that are multiples of it are compiled as such."""
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


class LaunchCompiler:
    """Compiles kernels with the arguments with which they are launched, and does not run them."""

    def __init__(self) -> None:
        self.shared_bytes: list[int] = []

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        for place, parameter in enumerate(kernel.params):
            value = given.pop(parameter.name)
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[(place,)] = value
                continue
            signature[parameter.name] = type_name(value)
            is_aligned = isinstance(value, Tensor) or (
                isinstance(value, int) and value % ALIGNED == 0
            )
            if is_aligned and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", ALIGNED]]
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=H200, options=given)
        self.shared_bytes.append(compiled.metadata.shared)


def type_name(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def check_compiles(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., object]) -> None:
    """Compile the one kernel that `launch` launches."""
    compiler = LaunchCompiler()
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *given, **named: compiler.run(kernel, *given, **named)
    )
    launch()
    (shared_bytes,) = compiler.shared_bytes
    assert shared_bytes <= SHARED_BYTES


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@DTYPES
@pytest.mark.parametrize(
    ("inputs", "outputs", "gated", "normed"),
    [
        (2048, 5120, False, True),
        (4096, 2048, False, False),
        (1024, 3072, True, True),
        (2048, 152_064, False, True),
        (50, 37, True, True),
    ],
)
def test_row_product_compiles_for_an_h200(
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    gated: bool,
    normed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_weights = outputs * (2 if gated else 1)
    rows, weight, bias = (
        empty(dtype, 3, inputs),
        empty(dtype, num_weights, inputs),
        empty(dtype, num_weights),
    )
    norm = empty(dtype, inputs) if normed else None
    residual = empty(dtype, 3, outputs)
    check_compiles(
        monkeypatch,
        lambda: launch_row_product(rows, weight, bias, norm, 1e-6, residual, gated),
    )


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "hidden", "width", "k"), [(1, 2048, 768, 8), (64, 1024, 384, 6)]
)
def test_expert_kernels_compile_for_an_h200(
    dtype: torch.dtype,
    num_rows: int,
    hidden: int,
    width: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, ids = empty(dtype, num_rows, hidden), empty(torch.int64, num_rows, k)
    gate_up, down = empty(dtype, 128, 2 * width, hidden), empty(dtype, 128, hidden, width)
    norm, acts = empty(dtype, hidden), empty(dtype, num_rows * k, width)
    outs, weights, gate = (
        empty(dtype, num_rows * k, hidden),
        empty(dtype, num_rows, k),
        empty(dtype, num_rows, 1),
    )
    check_compiles(monkeypatch, lambda: launch_route(empty(dtype, num_rows, 129), k, True, True))
    check_compiles(monkeypatch, lambda: launch_gate_up(rows, ids, gate_up, norm, 1e-6))
    check_compiles(monkeypatch, lambda: launch_down(acts, ids, down))
    check_compiles(monkeypatch, lambda: launch_combine(outs, weights, rows, rows, gate))
