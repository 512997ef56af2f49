"""Matrix product of a few rows as one operation, with the norm before it and the bias, activation
and residual after it.

On a GPU a decode step of few rows takes as long as reading its weights and launching its kernels;
fused, a norm, a product and what follows are one kernel. Legend: N rows, H inputs, O outputs, I
inner width of a gated MLP.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.linear import linear


def row_product(
    rows_NH: Tensor,
    weight_OH: Tensor,
    *,
    bias_O: Tensor | None = None,
    norm_H: Tensor | None = None,
    eps: float | None = None,
    residual_NO: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return rows x weight: [N, O] in the rows' dtype, accumulated in float32.

    With `norm_H` and `eps` the rows first pass an RMS norm with that weight, with `gated` the
    outputs pass a gated activation (SiLU), and `residual_NO` is added last; all intermediate
    results are rounded to the rows' dtype.

    Shapes: `weight_OH` [O, H]; if `gated`, [2 x I, H] with the gate first and `bias_O` [2 x I],
    while the result and `residual_NO` are [N, I]. Weights are contiguous; rows may be further apart
    than their size.
    Invariants: on a GPU a row's bytes do not depend on the number of rows or on the other rows.
    """
    assert (norm_H is None) == (eps is None), "a norm needs its weight and eps"
    return _row_product(rows_NH, weight_OH, bias_O, norm_H, eps or 0.0, residual_NO, gated)


def normed_rows(rows_NH: Tensor, norm_H: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of rows, multiplied by its weight. The norm and the product are each
    rounded to the rows' dtype.
    """
    size = rows_NH.shape[-1]
    if rows_NH.device.type != "cpu" or rows_NH.dtype != torch.float32:
        return F.rms_norm(rows_NH, (size,), None, eps) * norm_H
    # torch's norm is seven calls on a CPU
    length = torch.linalg.vector_norm(rows_NH, dim=-1, keepdim=True)
    scale = torch.addcmul(rows_NH.new_full((1,), eps), length, length, value=1.0 / size).rsqrt_()
    return rows_NH * scale * norm_H


@torch.library.custom_op("fleet::row_product", mutates_args=(), device_types="cpu")
def _row_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """Slow twin of `multiply_rows`."""
    out = linear(rows if norm is None else normed_rows(rows, norm, eps), weight, bias)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else residual + out


@_row_product.register_kernel("cuda")
def _row_product_on_gpu(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.row_product_triton import launch_row_product

    return launch_row_product(rows, weight, bias, norm, eps, residual, gated)


@_row_product.register_fake
def _row_product_shape(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    return rows.new_empty(len(rows), len(weight) // (2 if gated else 1))
