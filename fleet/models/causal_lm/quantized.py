"""Linear layers with weights in 8 or 4 bits, for CPUs, where a decode step takes as long as reading
the weights does. Activations keep their precision.

Rounded weights change an answer as another dtype does, so invariant numerics exclude them. Legend:
N rows, H inputs, O outputs, G groups of inputs.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

int8_product = cast(
    "Callable[[Tensor, Tensor, Tensor], Tensor]", torch.ops.aten._weight_int8pack_mm.default
)
"""Product of rows [N, H] in bfloat16 with weights [O, H] in 8 bits, times a scale per output."""
_pack_int4 = cast(
    "Callable[[Tensor, int], Tensor]",
    torch.ops.aten._convert_weight_to_int4pack_for_cpu.default,
)
_int4_product = cast(
    "Callable[[Tensor, Tensor, int, Tensor], Tensor]",
    torch.ops.aten._weight_int4pack_mm_for_cpu.default,
)
MOST_ROWS = 32
"""Largest number of rows for which the kernel reads weights in 8 bits as they are. With more rows,
as in a prompt, a product in 32 bits is faster although the weights are converted first (measured
with 896 inputs and 4,864 outputs: 24 rows 4.2 against 4.9 ms, 128 rows 19 against 10 ms).
"""
GROUP = 32
"""Inputs that share a scale and a zero in 4 bits, as in the usual files of 4-bit models."""
OUTPUTS_PER_BLOCK = 16
"""The kernel for 4 bits takes layers whose number of outputs is a multiple."""
_MAX_INT8, _MAX_INT4, _MIDDLE = 127, 15, 8
_LEAST_SCALE = 1e-12


class Int8Linear(nn.Module):
    """A linear layer in bfloat16 with the weights of `linear` rounded to 8 bits, with a scale for
    each output.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OH = linear.weight.detach().float()
        scale_O = (weight_OH.abs().amax(1) / _MAX_INT8).clamp_min(_LEAST_SCALE).bfloat16()
        weight_OH = (weight_OH / scale_O.float()[:, None]).round_().clamp_(-_MAX_INT8, _MAX_INT8)
        self.weight_OH = nn.Buffer(weight_OH.to(torch.int8))
        self.scale_O = nn.Buffer(scale_O)
        self.bias_O = cast("nn.Parameter | None", linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        rows_NH = rows.reshape(-1, rows.shape[-1]).contiguous()
        if 0 < len(rows_NH) <= MOST_ROWS:
            out_NO = int8_product(rows_NH, self.weight_OH, self.scale_O)
        else:
            product_NO = F.linear(rows_NH.float(), self.weight_OH.float())
            out_NO = (product_NO * self.scale_O.float()).to(rows.dtype)
        return _with_bias(out_NO, self.bias_O, rows)


class Int4Linear(nn.Module):
    """A linear layer in bfloat16 with the weights of `linear` rounded to 4 bits, with a scale and a
    zero for each output and group of inputs. The layer must be one that `fits_int4`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        groups_OGg = linear.weight.detach().float().unflatten(1, (-1, GROUP))
        least_OG, most_OG = groups_OGg.amin(-1), groups_OGg.amax(-1)
        scale_OG = ((most_OG - least_OG) / _MAX_INT4).clamp_min(_LEAST_SCALE).bfloat16()
        zero_OG = (least_OG + scale_OG.float() * _MIDDLE).bfloat16()
        steps = (groups_OGg - zero_OG.float()[..., None]) / scale_OG.float()[..., None]
        levels_OH = (steps + _MIDDLE).round_().clamp_(0, _MAX_INT4).flatten(1)
        self.packed = nn.Buffer(_pack_int4(levels_OH.to(torch.int32), 1))
        self.scale_zero_GO2 = nn.Buffer(
            torch.stack([scale_OG, zero_OG], -1).transpose(0, 1).contiguous()
        )
        self.bias_O = cast("nn.Parameter | None", linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        rows_NH = rows.reshape(-1, rows.shape[-1]).contiguous()
        out_NO = _int4_product(rows_NH, self.packed, GROUP, self.scale_zero_GO2)
        return _with_bias(out_NO, self.bias_O, rows)


def fits_int4(linear: nn.Linear) -> bool:
    return linear.in_features % GROUP == 0 and linear.out_features % OUTPUTS_PER_BLOCK == 0


def quantize(model: nn.Module, bits: int) -> None:
    """Replace every linear layer of a model by one in 8 or 4 bits; layers whose sizes do not fit 4
    bits get 8. Embeddings that share a layer's weights keep them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                in_int4 = bits == 4 and fits_int4(child)
                setattr(parent, name, Int4Linear(child) if in_int4 else Int8Linear(child))


def _with_bias(out_NO: Tensor, bias_O: Tensor | None, rows: Tensor) -> Tensor:
    """Return outputs with the bias, in the shape that belongs to the layer's `rows`."""
    if bias_O is not None:
        out_NO = out_NO + bias_O
    return out_NO.view(*rows.shape[:-1], out_NO.shape[-1])
