"""Parts of Triton kernels that multiply a tile of rows by a tile of weights: the norm of the rows,
the product, the activation, and rounding.

Tiles have fixed sizes and every sum a fixed order, so that an output depends on its own row and
weights only. Legend: N rows of a tile, H inputs, O outputs of a tile.
"""

import torch
import triton
import triton.language as tl

TILE_ROWS = 16
"""Number of rows of a tile: the fewest that a matrix instruction takes. A constant, because other
sizes may be compiled to instructions that add in another order.
"""
TILE_WEIGHTS = 4096
"""Number of weights that a program reads per iteration of its loop, in two-byte types: 8 KiB, of
which `NUM_STAGES` - 1 are on their way. Chosen by the sizes of an H200 (132 multiprocessors, 4.8
TB/s), not measured.
"""
MOST_INPUTS = 256
"""Largest number of inputs per iteration."""
NUM_STAGES = 6
"""Number of iterations whose weights are in shared memory at a time."""
NUM_WARPS = 4
ROWS = tl.constexpr(TILE_ROWS)
NORM_INPUTS = tl.constexpr(512)
"""Number of inputs of a row that the sum of its squares reads per iteration."""


def tile_inputs(dtype: torch.dtype, weight_rows: int) -> int:
    """Return the number of inputs per iteration of a program that reads `weight_rows` rows of
    weights.
    """
    return min(TILE_WEIGHTS // weight_rows, MOST_INPUTS) * 2 // dtype.itemsize


@triton.jit
def rounded(values, TO: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 values, rounded to the nearest value of type `TO` (ties to even) and widened
    again.

    Triton's interpreter, in which a cast to bfloat16 cuts the last bits off, rounds by the bits.
    """
    if TO != tl.float32:
        if INTERPRETED and TO == tl.bfloat16:
            bits = values.to(tl.uint32, bitcast=True)
            odd = (bits >> 16) & 1
            near = (bits + 0x7FFF + odd) & 0xFFFF0000
            is_nan = values != values
            values = tl.where(is_nan, values, near.to(tl.float32, bitcast=True))
        values = values.to(TO).to(tl.float32)
    return values


@triton.jit
def row_scales(rows_at, is_row, eps, H: tl.constexpr):
    """Return the factor by which an RMS norm multiplies each row: [N]. `rows_at`: pointers to the
    first input of each row, [N, 1].
    """
    squares = tl.zeros([ROWS, NORM_INPUTS], tl.float32)
    for first in tl.range(0, H, NORM_INPUTS, num_stages=3):
        h = first + tl.arange(0, NORM_INPUTS)
        is_read = is_row[:, None] & (h < H)[None, :]
        x = tl.load(rows_at + h[None, :], mask=is_read, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / H + eps)


@triton.jit
def add_product(x, weight, total, INTERPRETED: tl.constexpr):
    """Return `total` + x x weight. Triton's interpreter, which multiplies bfloat16 as if its bits
    were integers, gets float32.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    return tl.dot(x, weight, total, input_precision="ieee")


@triton.jit
def tile_product(
    rows_at,
    is_row,
    weight_at,
    is_output,
    norm_ptr,
    eps,
    UP: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the products of a tile's rows with a tile's weights, and with the weights `UP`
    elements further on, or zeros if `UP` is 0: both [N, O] in float32.

    The rows, of type `DTYPE`, are normed first if `norm_ptr` is not None. Shapes: `rows_at`
    pointers to the first input of each row, [N, 1]; `weight_at` to the first weight of each output,
    [1, O].
    """
    if norm_ptr is not None:
        scale = row_scales(rows_at, is_row, eps, H)[:, None]
    BLOCK_O: tl.constexpr = is_output.shape[0]
    total = tl.zeros([ROWS, BLOCK_O], tl.float32)
    up_total = tl.zeros([ROWS, BLOCK_O], tl.float32)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        is_input = h < H
        is_weight = is_input[:, None] & is_output[None, :]
        weight = tl.load(weight_at + h[:, None], mask=is_weight, other=0.0)
        x = tl.load(rows_at + h[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + h, mask=is_input, other=0.0).to(tl.float32)[None, :]
            normed = rounded(x.to(tl.float32) * scale, DTYPE, INTERPRETED) * norm
            x = rounded(normed, DTYPE, INTERPRETED).to(DTYPE)
        total = add_product(x, weight, total, INTERPRETED)
        if UP != 0:
            up_weight = tl.load(weight_at + UP + h[:, None], mask=is_weight, other=0.0)
            up_total = add_product(x, up_weight, up_total, INTERPRETED)
    return total, up_total


@triton.jit
def gated_values(gate, up, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return SiLU(gate) x up, each step rounded to `DTYPE`."""
    gate = rounded(gate, DTYPE, INTERPRETED)
    up = rounded(up, DTYPE, INTERPRETED)
    act = rounded(gate / (1.0 + tl.exp(-gate)), DTYPE, INTERPRETED)
    return rounded(act * up, DTYPE, INTERPRETED)
