"""Kernel of `row_product`. A program computes a tile of rows for a block of outputs and reads the
block's weights once.

Needs Triton, which comes with torch for CUDA. Memory-bound: sizes are chosen so that a product with
2,048 outputs or more occupies the 132 multiprocessors of an H200, not measured. Slow twin:
`row_product` on a CPU. Legend: N rows, H inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fleet.engine.torch.kernels.product_tiles_triton import (
    NUM_STAGES,
    NUM_WARPS,
    ROWS,
    TILE_ROWS,
    gated_values,
    rounded,
    tile_inputs,
    tile_product,
)

ENOUGH_PROGRAMS = 128
"""Number of programs per tile of rows below which a program takes fewer outputs."""
TILE_OUTPUTS = (64, 32)
"""Outputs of a program, if that leaves enough programs; otherwise `FEWEST_OUTPUTS`."""
FEWEST_OUTPUTS = 16


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    num_rows,
    row_stride,
    residual_stride,
    H: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write a tile of the outputs. Bias, norm and residual may be None."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_output = tl.program_id(1) * BLOCK_O
    output = first_output + tl.arange(0, BLOCK_O)
    is_row, is_output = row < num_rows, output < OUTPUTS
    rows_at = rows_ptr + row.to(tl.int64)[:, None] * row_stride
    # the block's place may exceed 32 bits, the place within it does not
    block_ptr = weight_ptr + first_output.to(tl.int64) * H
    weight_at = block_ptr + (tl.arange(0, BLOCK_O) * H)[None, :]
    UP: tl.constexpr = OUTPUTS * H if GATED else 0
    total, up_total = tile_product(
        rows_at, is_row, weight_at, is_output, norm_ptr, eps, UP, H, BLOCK_H, DTYPE, INTERPRETED
    )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
        total += bias[None, :]
        if GATED:
            up_bias = tl.load(bias_ptr + OUTPUTS + output, mask=is_output, other=0.0)
            up_total += up_bias.to(tl.float32)[None, :]
    if GATED:
        value = gated_values(total, up_total, DTYPE, INTERPRETED)
    else:
        value = rounded(total, DTYPE, INTERPRETED)
    is_out = is_row[:, None] & is_output[None, :]
    if residual_ptr is not None:
        at = row.to(tl.int64)[:, None] * residual_stride + output[None, :]
        residual = tl.load(residual_ptr + at, mask=is_out, other=0.0).to(tl.float32)
        value = rounded(residual + value, DTYPE, INTERPRETED)
    at_out = row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out_ptr + at_out, value.to(DTYPE), mask=is_out)


def launch_row_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """Launch `multiply_rows` on arguments as of `row_product`; tensors on a CPU need Triton's
    interpreter.
    """
    num_rows, inputs = rows.shape
    outputs = len(weight) // (2 if gated else 1)
    assert weight.shape[1] == inputs and weight.is_contiguous() and rows.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    out = torch.empty(num_rows, outputs, dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    block = block_outputs(outputs)
    multiply_rows[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(outputs, block))](
        rows,
        weight,
        bias,
        norm,
        residual,
        out,
        eps,
        num_rows,
        rows.stride(0),
        residual.stride(0) if residual is not None else 0,
        H=inputs,
        OUTPUTS=outputs,
        GATED=gated,
        BLOCK_O=block,
        BLOCK_H=tile_inputs(rows.dtype, block * (2 if gated else 1)),
        INTERPRETED=rows.device.type == "cpu",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


def block_outputs(outputs: int) -> int:
    """Return the number of outputs of a program, by the number of all outputs only."""
    for block in TILE_OUTPUTS:
        if triton.cdiv(outputs, block) >= ENOUGH_PROGRAMS:
            return block
    return FEWEST_OUTPUTS
