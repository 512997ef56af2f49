"""Mixture-of-experts layers with weights in 8-bit floating point (e4m3), one scale per output
channel. Activations are rounded to e4m3 as well, one scale per row, and everything else stays in
bfloat16.

A grouped product of e4m3 matrices is used on GPUs of compute capability 9.0. Other GPUs widen the
weights to bfloat16 for each step, which saves memory but no time. On a CPU the product is emulated,
for tests.
Legend: N rows, H hidden size, I expert width, E experts, k experts per row, P = N x k pairs of a
row and an expert, in the order of the experts; K inputs and O outputs of a product.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.experts import (
    ExpertWeights,
    grouped_experts,
    pairs_by_expert,
    weighted_sum,
)
from fleet.engine.torch.fp8 import E4M3, gated, quantized

WITH_GROUPED_PRODUCT = (9, 0)
"""The CUDA compute capability for which torch has a grouped product of e4m3 matrices. torch accepts
10.0 too, but its kernel is built for 9.0 alone. Source: torch 2.13, `_scaled_grouped_mm_cuda` in
aten/native/cuda/GroupedBlas.cpp, and ScaledGroupMM.cu.
"""
FIRST_WITH_CONVERSION = (8, 9)
"""First CUDA compute capability with instructions that convert to e4m3. Source: PTX ISA, `cvt`."""
ALIGNMENT = 16
"""Number of which the widths of a grouped product of e4m3 matrices must be multiples."""
USES_FAST_ACCUMULATION = False
"""Whether the tensor cores add all products in their own short accumulator, instead of in float32
after every few products. The emulation adds in float32.
"""

_scaled_grouped_mm = cast("Callable[..., Tensor]", torch.ops.aten._scaled_grouped_mm.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8ExpertWeights:
    """Weight matrices of all experts of a layer in e4m3, and the float32 scale of each output
    channel. Shapes: `gate_up` [E, 2 x I, H], `gate_up_scale` [E, 2 x I], `down` [E, H, I],
    `down_scale` [E, H].
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @classmethod
    def of(cls, matrices: ExpertWeights) -> Self:
        """Round the matrices of a layer, one expert after another."""
        num_experts = len(matrices.gate_up)
        gate_up, gate_up_scale = quantized_stack(matrices.gate_up, num_experts)
        down, down_scale = quantized_stack(matrices.down, num_experts)
        return cls(gate_up=gate_up, gate_up_scale=gate_up_scale, down=down, down_scale=down_scale)

    @property
    def is_aligned(self) -> bool:
        """Return True if the widths suit a grouped product of e4m3 matrices."""
        return all(size % ALIGNMENT == 0 for size in self.down.shape[1:])

    def of_experts(self, ids_P: Tensor) -> Self:
        """Return the matrices of the named experts, in that order, with repetitions."""
        return type(self)(
            gate_up=_picked(self.gate_up, ids_P),
            gate_up_scale=self.gate_up_scale[ids_P],
            down=_picked(self.down, ids_P),
            down_scale=self.down_scale[ids_P],
        )

    def widened(self, dtype: torch.dtype) -> ExpertWeights:
        """Return the matrices in another dtype, scales multiplied in."""
        return ExpertWeights(
            gate_up=_widened(self.gate_up, self.gate_up_scale, dtype),
            down=_widened(self.down, self.down_scale, dtype),
        )


def quantized_stack(matrices: Iterable[Tensor], num_matrices: int) -> tuple[Tensor, Tensor]:
    """Return matrices of one shape, taken one at a time, rounded to e4m3 and stacked, and the scale
    of each output channel: [E, O, K], [E, O].
    """
    rounded, scales = torch.empty(0), torch.empty(0)
    for number, matrix_OK in enumerate(matrices):
        if not number:
            shape, device = (num_matrices, *matrix_OK.shape), matrix_OK.device
            rounded = torch.empty(shape, dtype=E4M3, device=device)
            scales = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        rounded_OK, scale_O = quantized(matrix_OK)
        rounded[number].copy_(rounded_OK)
        scales[number].copy_(scale_O)
    return rounded, scales


def quantized_rows(rows_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as `quantized` does, by one kernel where the device has it: [N, K], [N]."""
    if not converts_to_e4m3(rows_NK.device):
        return quantized(rows_NK)
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.fp8_triton import launch_rows

    return launch_rows(rows_NK)


def quantized_gated(gate_up_N2I: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gated` of rows, rounded as by `quantized`, by one kernel where the device has it: [N,
    I], [N].
    """
    if not converts_to_e4m3(gate_up_N2I.device):
        return quantized(gated(gate_up_N2I))
    from fleet.engine.torch.fp8_triton import launch_gated

    return launch_gated(gate_up_N2I)


@cache
def converts_to_e4m3(device: torch.device) -> bool:
    """Return True for a GPU that converts numbers to e4m3."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_WITH_CONVERSION
    )


Fp8Product = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor], Tensor]
"""Grouped product of e4m3 matrices in bfloat16: (rows [P, K] and scales [P], weights [E, O, K] and
scales [E, O], int32 end row of each expert [E]) -> [P, O].
"""


def scaled_product(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], ends_E: Tensor
) -> Tensor:
    """Return the grouped product by torch's kernel. Shapes: see `Fp8Product`."""
    (rows_PK, scale_P), (weights_EOK, scale_EO) = rows, weights
    return _scaled_grouped_mm(
        rows_PK,
        weights_EOK.mT,
        scale_P,
        scale_EO,
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=USES_FAST_ACCUMULATION,
    )


def emulated_product(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], ends_E: Tensor
) -> Tensor:
    """Return the grouped product by float32 products of the same e4m3 values: the slow twin of
    `scaled_product`. Reads the ends of the groups on the host.
    """
    (rows_PK, scale_P), (weights_EOK, scale_EO) = rows, weights
    out_PO = torch.empty(
        len(rows_PK), weights_EOK.shape[1], dtype=torch.bfloat16, device=rows_PK.device
    )
    start = 0
    for expert, stop in enumerate(ends_E.tolist()):
        if start < stop:
            product = F.linear(rows_PK[start:stop].float(), weights_EOK[expert].float())
            out_PO[start:stop] = product * scale_P[start:stop, None] * scale_EO[expert]
        start = stop
    return out_PO


def fp8_experts(
    rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: Fp8ExpertWeights
) -> Tensor:
    """Return the weighted sum of each row's experts by the method of the rows' device: [N, H]. On a
    GPU no value is read by the host, and no shape depends on the routing.
    """
    if rows_NH.device.type != "cuda":
        return fp8_products(rows_NH, ids_Nk, weights_Nk, matrices, emulated_product)
    if has_grouped_product(rows_NH.device) and matrices.is_aligned:
        return fp8_products(rows_NH, ids_Nk, weights_Nk, matrices, scaled_product)
    return widened_experts(rows_NH, ids_Nk, weights_Nk, matrices)


def fp8_products(
    rows_NH: Tensor,
    ids_Nk: Tensor,
    weights_Nk: Tensor,
    matrices: Fp8ExpertWeights,
    product: Fp8Product,
) -> Tensor:
    """Return the weighted sum of each row's experts, computed as two grouped products of e4m3
    matrices.
    """
    order_P, ends_E = pairs_by_expert(ids_Nk, len(matrices.gate_up))
    rounded_NH, scale_N = quantized_rows(rows_NH)
    row_P = order_P // ids_Nk.shape[1]
    picked = _picked(rounded_NH, row_P), scale_N[row_P]
    gate_up = product(picked, (matrices.gate_up, matrices.gate_up_scale), ends_E)
    outs = product(quantized_gated(gate_up), (matrices.down, matrices.down_scale), ends_E)
    return weighted_sum(outs.to(rows_NH.dtype), order_P, weights_Nk)


def widened_experts(
    rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: Fp8ExpertWeights
) -> Tensor:
    """Return the weighted sum of each row's experts with weights that are widened to the dtype of
    the rows first: those of each pair if there are fewer pairs than experts, else all. Activations
    are not rounded.
    """
    num_rows, k = ids_Nk.shape
    if num_rows * k >= len(matrices.gate_up):
        wide = matrices.widened(rows_NH.dtype)
        return grouped_experts(rows_NH, ids_Nk, weights_Nk, wide)
    wide = matrices.of_experts(ids_Nk.flatten()).widened(rows_NH.dtype)
    rows_PH1 = rows_NH.repeat_interleave(k, 0)[:, :, None]
    gate, up = torch.bmm(wide.gate_up, rows_PH1).chunk(2, dim=1)
    outs = torch.bmm(wide.down, F.silu(gate) * up)
    return torch.bmm(weights_Nk[:, None], outs.view(num_rows, k, -1))[:, 0]


@cache
def has_grouped_product(device: torch.device) -> bool:
    """Return True for a GPU on which torch multiplies groups of e4m3 matrices."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) == WITH_GROUPED_PRODUCT
    )


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """Return entries of an e4m3 tensor along the first dimension; bytes are copied, since indexing
    need not know e4m3.
    """
    return values.view(torch.uint8)[index].view(E4M3)


def _widened(matrices: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return matrices.to(dtype).mul_(scales.to(dtype)[..., None])
