"""The decoder stack that Thinker, Talker and code predictor share, as plain functions on loaded
weights.

The Python overhead of `transformers` modules exceeds the arithmetic of a small model; here a layer
is twenty calls. Source: transformers 5.23, modeling_qwen3_omni_moe.py (`...DecoderLayer`,
`...Attention`, `...SparseMoeBlock`). Legend: N positions, H hidden size, h query heads, k key/value
heads, d head size, I inner width, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.experts import Experts, ExpertWeights
from fleet.engine.torch.fp8_experts import Fp8ExpertWeights, fp8_experts
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import AttentionParams, Layout
from fleet.engine.torch.linear import linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """A gated MLP (SiLU). Shapes: `gate_up` [2 x I, H], `down` [H, I]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, rows_NH: Tensor) -> Tensor:
        gate, up = linear(rows_NH, self.gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """Routed experts, and a shared one if the model has it. Shapes: `router` [E, H], `shared_gate`
    [1, H]. `experts`: function that computes matrices which are not in e4m3.
    """

    router: Tensor
    matrices: ExpertWeights | Fp8ExpertWeights
    num_chosen: int
    normalise: bool
    experts: Experts
    shared: GatedMlp | None = None
    shared_gate: Tensor | None = None

    def __call__(self, rows_NH: Tensor) -> Tensor:
        probabilities_NE = linear(rows_NH, self.router).softmax(-1, dtype=torch.float32)
        weights_Nk, ids_Nk = probabilities_NE.topk(self.num_chosen, dim=-1)
        if self.normalise:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        weights_Nk, matrices = weights_Nk.to(rows_NH.dtype), self.matrices
        out_NH = (
            fp8_experts(rows_NH, ids_Nk, weights_Nk, matrices)
            if isinstance(matrices, Fp8ExpertWeights)
            else self.experts(rows_NH, ids_Nk, weights_Nk, matrices)
        )
        if self.shared is None or self.shared_gate is None:
            return out_NH
        return out_NH + linear(rows_NH, self.shared_gate).sigmoid() * self.shared(rows_NH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer. Shapes: `qkv` [(h + 2k) x d, H], `qk_norm` [h + k, d] (one row
    per head), `out` [H, h x d].
    """

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
"""Rotary embedding of positions as cosines and signed sines: [N, 1, d], or [1, d] if all hidden
states have the same position.
"""


class RmsNorm:
    """Root-mean-square norm over the last dimension of width `size`, without a weight: the caller
    multiplies by it. `like`: tensor with the device and dtype of the input.
    """

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        self._size, self._eps = size, eps
        self._eps_1 = torch.full((1,), eps, dtype=torch.float32, device=like.device)
        # torch's norm is one kernel on a GPU, but seven calls on a CPU
        self._unfused = like.device.type == "cpu" and like.dtype == torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        return (
            rows * self._scale(rows)
            if self._unfused
            else F.rms_norm(rows, (self._size,), None, self._eps)
        )

    def in_place(self, rows: Tensor) -> Tensor:
        return (
            rows.mul_(self._scale(rows))
            if self._unfused
            else rows.copy_(F.rms_norm(rows, (self._size,), None, self._eps))
        )

    def _scale(self, rows: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return torch.addcmul(self._eps_1, length, length, value=1.0 / self._size).rsqrt_()


class Decoder:
    """Consecutive layers of a decoder, with the final norm if it was loaded with them.

    `first`: the model's number of the first layer, which is layer 0 of the KV pool. `kv_shape`:
    shape of the keys and values in the pool. Shapes: `rope` is [positions, 2 (cosine, signed sine),
    1, d]; `norm` [H].
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        norm: Tensor | None,
        rope: Tensor,
        *,
        first: int = 0,
    ) -> None:
        self.shape = shape
        self.layers = layers
        self.norm = norm
        self.rope = rope
        self.first = first
        self.kv_shape = KVShape(
            num_layers=len(layers), num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
        )
        self._params = AttentionParams(scale=shape.head_dim**-0.5)
        like = layers[0].input_norm
        self.hidden_size = len(like)
        self._row_norm = RmsNorm(self.hidden_size, shape.eps, like)
        self._head_norm = RmsNorm(shape.head_dim, shape.eps, like)

    def weights(self) -> dict[str, Tensor]:
        """Return the loaded weights by name, such as `layers.3.qkv`; layers are numbered as in the
        model.
        """
        found = {"norm": self.norm} if self.norm is not None else {}
        for number, layer in enumerate(self.layers, start=self.first):
            found |= _tensors_in(layer, f"layers.{number}")
        return found

    def turns_at(self, positions: Tensor | int) -> Turns:
        """Return the rotary embedding at each position of a tensor, or at the one position of an
        int.
        """
        cos, sin = self.rope[positions].unbind(-3)
        return cos, sin

    def forward(
        self,
        rows_NH: Tensor,
        layout: Layout,
        *,
        tap: int | None = None,
        turns: Turns | None = None,
        entering: dict[int, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers and the final norm. Return the final hidden states, and the hidden states
        that enter layer `tap` (None without `tap`).

        `entering`: filled in with the hidden states that enter each layer whose number is a key.
        """
        rows_NH, tapped = self.run_layers(rows_NH, layout, tap=tap, turns=turns, entering=entering)
        return self.finish(rows_NH), tapped

    def run_layers(
        self,
        rows_NH: Tensor,
        layout: Layout,
        *,
        tap: int | None = None,
        turns: Turns | None = None,
        entering: dict[int, Tensor | None] | None = None,
        stop: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers without the final norm. Return the hidden states after the last layer, and
        the hidden states that enter the model's layer `tap`; None if that layer is not here.

        `turns`: rotary embedding of the layout's positions; computed if absent. `entering`: see
        `forward`. `stop`: number of layers to run; None for all.
        """
        turns = turns or self.turns_at(layout.positions)
        tapped, tap_at = None, None if tap is None else tap - self.first
        for number, layer in enumerate(self.layers[:stop]):
            if number == tap_at:
                tapped = rows_NH
            if entering is not None and number + self.first in entering:
                entering[number + self.first] = rows_NH
            rows_NH = self._layer(number, layer, rows_NH, turns, layout)
        return rows_NH, tapped

    def finish(self, rows_NH: Tensor) -> Tensor:
        """Apply the final norm, with which the decoder must have been loaded, to hidden states."""
        assert self.norm is not None, "a decoder without the final norm"
        return self._row_norm(rows_NH) * self.norm

    def _layer(
        self, number: int, layer: LayerWeights, rows_NH: Tensor, turns: Turns, layout: Layout
    ) -> Tensor:
        shape, (cos, sin) = self.shape, turns
        normed = self._row_norm(rows_NH) * layer.input_norm
        heads = linear(normed, layer.qkv, layer.qkv_bias).view(rows_NH.shape[0], -1, shape.head_dim)
        turned = heads[:, : shape.num_heads + shape.num_kv_heads]
        self._head_norm.in_place(turned).mul_(layer.qk_norm)
        # rotate_half(x) * sin == roll(x) * sin with the sign of its first half flipped
        rolled = turned.roll(shape.head_dim // 2, -1)
        turned.mul_(cos).addcmul_(rolled, sin)
        q_Nhd, kv_Nkd = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        rows_NH = rows_NH + linear(layout.attend(number, q_Nhd, kv_Nkd, self._params), layer.out)
        normed = self._row_norm(rows_NH) * layer.post_norm
        return rows_NH + layer.mlp(normed)


def _tensors_in(part: object, name: str) -> dict[str, Tensor]:
    """Return all tensors of a layer, or of a part of a layer, by dotted names that begin with
    `name`.
    """
    if isinstance(part, Tensor):
        return {name: part}
    found: dict[str, Tensor] = {}
    if isinstance(part, LayerWeights | GatedMlp | SparseMlp | ExpertWeights | Fp8ExpertWeights):
        for field in fields(part):
            found |= _tensors_in(getattr(part, field.name), f"{name}.{field.name}")
    return found


def rope_table(inv_freq: Tensor, scaling: float, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Return cosines and signed sines of the rotary embedding at positions 0 to `num_positions` -
    1.

    Shapes: `inv_freq` [d / 2] -> [positions, 2, 1, d]. Text and audio positions have equal time,
    height and width, so the interleaved three-part rotary embedding is the plain one.
    """
    angles = torch.arange(num_positions, device=inv_freq.device)[:, None].float() * inv_freq.float()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table[:, :, None].to(dtype)
