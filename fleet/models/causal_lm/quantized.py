"""Linear layers with weights in 16, 8 or 4 bits, for CPUs, where a decode step takes as long as
reading the weights does. Activations keep their precision.

Rounded weights change an answer as another dtype does, so invariant numerics exclude them. Legend:
N rows, H inputs, O outputs, G groups of inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_int8_product_anywhere = cast(
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
"""Largest number of rows for which the portable kernel reads weights in 8 bits as they are. With
more rows, as in a prompt, a product in 32 bits is faster although the weights are converted first
(measured with 896 inputs and 4,864 outputs: 24 rows 4.2 against 4.9 ms, 128 rows 19 against 10 ms).
"""
GROUP = 32
"""Inputs that share a scale and a zero in 4 bits, as in the usual files of 4-bit models."""
OUTPUTS_PER_BLOCK = 16
"""Number of outputs that the 4-bit kernel computes together; a layer's number of outputs must be a
multiple.
"""
SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers in `transformers` that are applied to the same rows, by group."""
OUTPUTS_AT_ONCE = 1024
"""Number of outputs whose weights are converted to 32 bits at once. All 150,000 outputs of an
output head would take 0.5 GB.
"""
FEW_ROWS = 2
"""Largest number of rows for which `Bfloat16Linear` reads weights as they are."""
_MAX_INT8, _MAX_INT4, _MIDDLE = 127, 15, 8
_BASE = 1 << 7
_MIDDLE_LEVEL = 1 << 20
_MOST_LEVEL = _MIDDLE_LEVEL - 1
_ROUNDED_MIDDLE = torch.tensor(_MIDDLE_LEVEL + 0.5)
_SHIFTS_D11 = torch.tensor([14, 7, 0], dtype=torch.int32).view(3, 1, 1)
_LEAST_SCALE = 1e-12


class Bfloat16Linear(nn.Module):
    """A linear layer in bfloat16, for processors without products of 16-bit matrices, where
    `F.linear` multiplies rows one by one (AVX2, 576 inputs and 1,536 outputs: 1 row 0.15 ms, 32
    rows 3.9 ms, after a conversion to 32 bits 1.2 ms).
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias_O = _bias(linear)

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() <= FEW_ROWS * rows.shape[-1]:
            return F.linear(rows, self.weight, self.bias_O)
        rows_NH = rows.reshape(-1, rows.shape[-1]).float()
        parts = [F.linear(rows_NH, part.float()) for part in self.weight.split(OUTPUTS_AT_ONCE)]
        return _with_bias(torch.cat(parts, -1).to(rows.dtype), self.bias_O, rows)


class Int8Linear(nn.Module):
    """A linear layer with the weights of `linear` rounded to 8 bits, with a scale for each output.
    Inputs are rounded to 21 bits, relative to the largest input of their row; the three digits in
    base 128 of each row become three rows of one exact product in 8 bits.

    Reading weights takes most of the time. With 896 inputs and 4,864 outputs outside of the caches
    a product takes 0.46 ms with one row of digits and 0.51 with three (Xeon with AVX-512, other
    programs beside it; the portable kernel 0.8, bfloat16 1.1, the sum of as many bytes 0.42).
    Digits have 7 bits because processors without VNNI add two products in 16 bits.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OH, scale_O = _rounded_to_int8(linear, torch.float32)
        self._packed = _pack_int8(weight_OH)
        self._scale_O, self._zero_O = scale_O, torch.zeros(len(scale_O), dtype=torch.int32)
        self._sum_O = weight_OH.sum(1).mul(scale_O).mul_(_MIDDLE_LEVEL // _BASE)
        self.bias_O = _bias(linear)

    def forward(self, rows: Tensor) -> Tensor:
        rows_NH = rows.reshape(-1, rows.shape[-1]).float()
        if not len(rows_NH):
            return rows.new_empty(*rows.shape[:-1], len(self._scale_O))
        largest_N1 = torch.linalg.vector_norm(rows_NH, math.inf, 1, keepdim=True)
        step_N1 = largest_N1.div_(_MOST_LEVEL).clamp_min_(_LEAST_SCALE)
        levels_NH = torch.addcdiv(_ROUNDED_MIDDLE, rows_NH, step_N1).to(torch.int32)
        digits_DNH = (levels_NH >> _SHIFTS_D11).bitwise_and_(_BASE - 1).to(torch.uint8)
        product = _int8_product(digits_DNH.flatten(0, 1), self._packed, self._scale_O, self._zero_O)
        high_NO, middle_NO, low_NO = product.view(3, len(rows_NH), -1).unbind()
        sum_NO = high_NO.mul_(_BASE).add_(middle_NO).sub_(self._sum_O)
        out_NO = sum_NO.mul_(_BASE).add_(low_NO).mul_(step_N1)
        return _with_bias(out_NO.to(rows.dtype), self.bias_O, rows)


class PortableInt8Linear(nn.Module):
    """A linear layer with weights in 8 bits and activations in bfloat16, for processors that have
    no fast product of two 8-bit matrices.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OH, scale_O = _rounded_to_int8(linear, torch.bfloat16)
        self.weight_OH = nn.Buffer(weight_OH)
        self.scale_O = nn.Buffer(scale_O)
        self.bias_O = _bias(linear)

    def forward(self, rows: Tensor) -> Tensor:
        rows_NH = rows.reshape(-1, rows.shape[-1]).contiguous()
        if 0 < len(rows_NH) <= MOST_ROWS:
            out_NO = _int8_product_anywhere(rows_NH, self.weight_OH, self.scale_O)
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
        self.bias_O = _bias(linear)

    def forward(self, rows: Tensor) -> Tensor:
        rows_NH = rows.reshape(-1, rows.shape[-1]).contiguous()
        out_NO = _int4_product(rows_NH, self.packed, GROUP, self.scale_zero_GO2)
        return _with_bias(out_NO, self.bias_O, rows)


def int8_layer(linear: nn.Linear) -> nn.Module:
    """Return a linear layer in 8 bits with the faster kernel for this processor. With AVX2 that is
    the portable kernel: SmolLM2 (135M) makes 25 tokens per second of CPU time, instead of 16.
    """
    return Int8Linear(linear) if multiplies_short_numbers() else PortableInt8Linear(linear)


def multiplies_short_numbers() -> bool:
    """Return True if oneDNN has products of 16-bit and 8-bit matrices for this processor."""
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_avx512 and torch.backends.mkldnn.is_available()


def widen_products(model: nn.Module) -> None:
    """Replace the linear layers of a bfloat16 model by `Bfloat16Linear` if this processor has no
    products of 16-bit matrices; otherwise leave the model unchanged.
    """
    if not multiplies_short_numbers():
        _replace_layers(model, Bfloat16Linear)


def _pack_int8(weight_OH: Tensor) -> Tensor:
    """Return weights in 8 bits in the order in which `_int8_product` reads them."""
    pack = cast("Callable[..., Tensor]", torch.ops.onednn.qlinear_prepack.default)
    return pack(weight_OH, [1, weight_OH.shape[1]])


def _int8_product(digits_NH: Tensor, packed: Tensor, scale_O: Tensor, zero_O: Tensor) -> Tensor:
    """Return the product of digits, uint8 [N, H], with packed weights, times a scale per output:
    float32 [N, O].
    """
    product = cast("Callable[..., Tensor]", torch.ops.onednn.qlinear_pointwise.default)
    weights, output = (packed, scale_O, zero_O), (1.0, 0, torch.float32, "none", [], "")
    return product(digits_NH, 1.0, 0, *weights, None, *output)


def _rounded_to_int8(linear: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a layer's weights in 8 bits [O, H], and their scale for each output [O] in `dtype`."""
    parts: list[tuple[Tensor, Tensor]] = []
    for part_OH in linear.weight.detach().split(OUTPUTS_AT_ONCE):
        weight_OH = part_OH.float()
        scale_O = (weight_OH.abs().amax(1) / _MAX_INT8).clamp_min(_LEAST_SCALE).to(dtype)
        weight_OH = (weight_OH / scale_O.float()[:, None]).round_().clamp_(-_MAX_INT8, _MAX_INT8)
        parts.append((weight_OH.to(torch.int8), scale_O))
    weights, scales = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(scales)


def fits_int4(linear: nn.Linear) -> bool:
    return linear.in_features % GROUP == 0 and linear.out_features % OUTPUTS_PER_BLOCK == 0


class JoinedLinear:
    """Several linear layers in 8 bits that a model applies to the same rows. A single
    product computes all of them when the first is applied; rows that differ are computed anew.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight_OH = torch.cat([layer.weight.detach() for layer in layers])
        joined = nn.Linear(weight_OH.shape[1], len(weight_OH), bias=False, device="meta")
        joined.weight = nn.Parameter(weight_OH, requires_grad=False)
        biases: list[Tensor] = [bias for layer in layers if (bias := _bias(layer)) is not None]
        if biases:
            joined.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False)
        self._layer, self._sizes = int8_layer(joined), [layer.out_features for layer in layers]
        self._rows: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def take(self, number: int, rows: Tensor) -> Tensor:
        """Return the output of layer `number` for `rows`. The first call for a tensor `rows`
        computes all layers; each output is kept until it is taken, or another tensor comes.
        """
        if rows is not self._rows or number not in self._outputs:
            outputs = self._layer(rows).split(self._sizes, -1)
            self._rows, self._outputs = rows, dict(enumerate(outputs))
        output = self._outputs.pop(number).contiguous()
        if not self._outputs:
            self._rows = None
        return output


class JoinedPart(nn.Module):
    """A layer of a `JoinedLinear`."""

    def __init__(self, joined: JoinedLinear, number: int) -> None:
        super().__init__()
        self._joined, self._number = joined, number

    def forward(self, rows: Tensor) -> Tensor:
        return self._joined.take(self._number, rows)


def quantize(model: nn.Module, bits: int) -> None:
    """Replace every linear layer of a model by one in 8 or 4 bits; layers whose sizes do not fit 4
    bits get 8. Embeddings that share a layer's weights keep them.
    """
    if bits == 8:
        for parent in list(model.modules()):
            _join_layers(parent)
    _replace_layers(
        model, lambda each: Int4Linear(each) if bits == 4 and fits_int4(each) else int8_layer(each)
    )


def _replace_layers(model: nn.Module, layer: Callable[[nn.Linear], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, layer(child))


def _join_layers(parent: nn.Module) -> None:
    for names in SAME_ROWS:
        layers = [
            child for name in names if type(child := getattr(parent, name, None)) is nn.Linear
        ]
        kinds = {(layer.in_features, _bias(layer) is None) for layer in layers}
        if len(layers) == len(names) and len(kinds) == 1:
            joined = JoinedLinear(layers)
            for number, name in enumerate(names):
                setattr(parent, name, JoinedPart(joined, number))


def _bias(linear: nn.Linear) -> nn.Parameter | None:
    return cast("nn.Parameter | None", linear.bias)


def _with_bias(out_NO: Tensor, bias_O: Tensor | None, rows: Tensor) -> Tensor:
    """Return outputs with the bias, in the shape that belongs to the layer's `rows`."""
    if bias_O is not None:
        out_NO = out_NO + bias_O
    return out_NO.view(*rows.shape[:-1], out_NO.shape[-1])
