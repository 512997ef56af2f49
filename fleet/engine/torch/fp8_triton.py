"""Triton kernel that rounds rows to e4m3 with a scale per row, one program per row. A launch
replaces about eight operations, and a decode step needs two in every layer.

Needs Triton, which comes with torch for CUDA. Slow twins: `quantized` and `gated` in `fp8.py`. Run
in Triton's interpreter, and compiled for compute capability 9.0 (Triton 3.9): neither run nor
measured on a GPU.
Legend: N rows, K columns, I expert width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fleet.engine.torch.fp8 import E4M3, E4M3_MAX, LEAST_SCALE


@triton.jit
def round_rows(
    rows_ptr,
    rounded_ptr,
    scale_ptr,
    row_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    IS_GATED: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Write a row of SIZE columns in e4m3, and its scale. With IS_GATED the row is silu(gate) x up,
    where gate and up are the first and second SIZE columns of the given row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    at = rows_ptr + row * row_stride + column
    values = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(at + SIZE, mask=is_column, other=0.0).to(tl.float32)
        values = values * tl.sigmoid(values) * up
    scale = tl.maximum(tl.max(tl.abs(values), 0) / MAX, LEAST)
    scaled = tl.clamp(values / scale, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(rounded_ptr + row * SIZE + column, scaled.to(tl.float8e4nv), mask=is_column)
    tl.store(scale_ptr + row, scale)


def launch_rows(rows_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 and their scales: [N, K], [N]. The columns of a row must be adjacent."""
    return _launch(rows_NK, rows_NK.shape[1], is_gated=False)


def launch_gated(gate_up_N2I: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) x up in e4m3 and the scales of its rows: [N, I], [N]. The columns of a row
    must be adjacent.
    """
    return _launch(gate_up_N2I, gate_up_N2I.shape[1] // 2, is_gated=True)


def _launch(rows: Tensor, size: int, *, is_gated: bool) -> tuple[Tensor, Tensor]:
    assert rows.stride(1) == 1, "columns that are not adjacent"
    rounded = torch.empty(len(rows), size, dtype=E4M3, device=rows.device)
    scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    round_rows[(len(rows),)](
        rows,
        rounded,
        scale,
        rows.stride(0),
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        IS_GATED=is_gated,
        MAX=E4M3_MAX,
        LEAST=LEAST_SCALE,
    )
    return rounded, scale
