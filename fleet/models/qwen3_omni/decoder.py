"""The decoder stack that Thinker, Talker and code predictor share, as plain functions of rows over loaded weights.

The Python overhead of `transformers` modules exceeds the arithmetic of a small model; written out, a layer is twenty calls.
Source: transformers 5.23, modeling_qwen3_omni_moe.py (`...DecoderLayer`, `...Attention`, `...SparseMoeBlock`).
Legend: N rows, H hidden size, h query heads, k key/value heads, d head size, I inner width, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.experts import Experts, ExpertWeights
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import AttentionParams, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """Shapes: `gate_up` [2 x I, H], `down` [H, I]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, rows_NH: Tensor) -> Tensor:
        gate, up = F.linear(rows_NH, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """Routed experts, and a shared one if the model has it. Shapes: `router` [E, H], `shared_gate` [1, H]."""

    router: Tensor
    matrices: ExpertWeights
    num_chosen: int
    normalise: bool
    experts: Experts
    shared: GatedMlp | None = None
    shared_gate: Tensor | None = None

    def __call__(self, rows_NH: Tensor) -> Tensor:
        probabilities_NE = F.linear(rows_NH, self.router).softmax(-1, dtype=torch.float32)
        weights_Nk, ids_Nk = probabilities_NE.topk(self.num_chosen, dim=-1)
        if self.normalise:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        out_NH = self.experts(rows_NH, ids_Nk, weights_Nk.to(rows_NH.dtype), self.matrices)
        if self.shared is None or self.shared_gate is None:
            return out_NH
        return out_NH + F.linear(rows_NH, self.shared_gate).sigmoid() * self.shared(rows_NH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Shapes: `qkv` [(h + 2k) x d, H], `qk_norm` [h + k, d] (one row a head), `out` [H, h x d]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor
    out: Tensor
    post_norm: Tensor
    mlp: GatedMlp | SparseMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


Turns = tuple[Tensor, Tensor]
"""Cosines and signed sines: [N, 1, d], or [1, d] if all rows are at one position."""


class RmsNorm:
    """Root-mean-square norm over the last dimension, `size` wide. The caller multiplies with the weight, if any."""

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        self._size, self._eps = size, eps
        self._eps_1 = torch.full((1,), eps, dtype=torch.float32, device=like.device)
        # torch's norm is one kernel on a GPU, but seven calls on a CPU
        self._unfused = like.device.type == "cpu" and like.dtype == torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        return rows * self._scale(rows) if self._unfused else F.rms_norm(rows, (self._size,), None, self._eps)

    def in_place(self, rows: Tensor) -> Tensor:
        return rows.mul_(self._scale(rows)) if self._unfused else rows.copy_(F.rms_norm(rows, (self._size,), None, self._eps))

    def _scale(self, rows: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return torch.addcmul(self._eps_1, length, length, value=1.0 / self._size).rsqrt_()


class Decoder:
    """Shapes: `rope` is [positions, 2 (cosine, signed sine), 1, d]; `norm` [H]. `kv_shape`: of its layers' KV pool."""

    def __init__(self, shape: DecoderShape, layers: Sequence[LayerWeights], norm: Tensor, rope: Tensor) -> None:
        self.shape, self.layers, self._norm, self._rope = shape, layers, norm, rope
        self.kv_shape = KVShape(num_layers=len(layers), num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        self._params = AttentionParams(scale=shape.head_dim**-0.5)
        self._row_norm = RmsNorm(len(norm), shape.eps, norm)
        self._head_norm = RmsNorm(shape.head_dim, shape.eps, norm)

    def turns_at(self, positions: Tensor | int) -> Turns:
        """Return the turns of each row's position, or of one that all rows share."""
        cos, sin = self._rope[positions].unbind(-3)
        return cos, sin

    def forward(
        self, rows_NH: Tensor, layout: Layout, *, tap: int | None = None, turns: Turns | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the final normed rows, and the rows that enter layer `tap`. `turns`: those of the layout's positions."""
        turns = turns or self.turns_at(layout.positions)
        tapped = None
        for number, layer in enumerate(self.layers):
            if number == tap:
                tapped = rows_NH
            rows_NH = self._layer(number, layer, rows_NH, turns, layout)
        return self._row_norm(rows_NH) * self._norm, tapped

    def _layer(self, number: int, layer: LayerWeights, rows_NH: Tensor, turns: Turns, layout: Layout) -> Tensor:
        shape, (cos, sin) = self.shape, turns
        normed = self._row_norm(rows_NH) * layer.input_norm
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(rows_NH.shape[0], -1, shape.head_dim)
        turned = heads[:, : shape.num_heads + shape.num_kv_heads]
        self._head_norm.in_place(turned).mul_(layer.qk_norm)
        # rotate_half(x) * sin == roll(x) * sin with the sign of its first half flipped
        rolled = turned.roll(shape.head_dim // 2, -1)
        turned.mul_(cos).addcmul_(rolled, sin)
        q_Nhd, kv_Nkd = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        rows_NH = rows_NH + F.linear(layout.attend(number, q_Nhd, kv_Nkd, self._params), layer.out)
        normed = self._row_norm(rows_NH) * layer.post_norm
        return rows_NH + layer.mlp(normed)


def rope_table(inv_freq: Tensor, scaling: float, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Return cosines and signed sines of every position a pool can hold.

    Shapes: `inv_freq` [d / 2] -> [positions, 2, 1, d]. Text and audio positions have equal time, height and width, so the
    interleaved three-part rotary embedding is the plain one.
    """
    angles = torch.arange(num_positions, device=inv_freq.device)[:, None].float() * inv_freq.float()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table[:, :, None].to(dtype)
