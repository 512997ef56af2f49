"""The decoder's layers as few kernels, for decode steps on a GPU: norms, activations, residuals and
rotary embeddings are computed within the products and the attention beside them.

A layer is seven kernels, eleven with routed experts and thirteen with a shared expert, where
`Decoder` has more than forty. In a captured graph each costs about 2 us, however small it is
(H200). Slow twin: `Decoder.run_layers`. Legend: N rows, H hidden size, E experts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fleet.engine.torch.attention_step import HeadWeights, StepLayout
from fleet.engine.torch.fp8_experts import Fp8ExpertWeights
from fleet.engine.torch.kernels.routed_experts import (
    combine_experts,
    expert_down,
    expert_gate_up,
    route,
)
from fleet.engine.torch.kernels.row_product import normed_rows, row_product
from fleet.engine.torch.layout import AttentionParams, Layout
from fleet.models.qwen3_omni.decoder import Decoder, GatedMlp, LayerWeights, SparseMlp

Attend = Callable[[int, Tensor, LayerWeights], Tensor]
"""Function that computes a layer's attention: (number of the layer in its process, queries, keys
and values of the rows before their norms and rotation, weights) -> [N, h x d].
"""


NUM_TRIAL_LAYERS = 2
"""Number of layers that `trial` runs."""


class FusedDecoder:
    """The layers of a decoder for rows whose keys and values `attend` stores."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._eps = decoder.shape.eps
        self._routers = [_router(layer.mlp) for layer in decoder.layers]

    def run_layers(
        self,
        rows_NH: Tensor,
        attend: Attend,
        *,
        tap: int | None = None,
        stop: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers, up to number `stop`, without the final norm. Return the hidden states
        after the last layer, and the hidden states that enter the model's layer `tap`; None if that
        layer is not here.
        """
        tapped = None
        for number, layer in enumerate(self._decoder.layers[:stop]):
            if tap is not None and number == tap - self._decoder.first:
                tapped = rows_NH
            qkv = row_product(
                rows_NH, layer.qkv, bias_O=layer.qkv_bias, norm_H=layer.input_norm, eps=self._eps
            )
            rows_NH = row_product(attend(number, qkv, layer), layer.out, residual_NO=rows_NH)
            rows_NH = self._mlp(number, layer, rows_NH)
        return rows_NH, tapped

    def forward(
        self,
        rows_NH: Tensor,
        layout: Layout,
        *,
        tap: int | None = None,
        entering: dict[int, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers and the final norm over rows of a KV pool: as `Decoder.forward`, and by it
        unless the layout is of a step that is computed by fused kernels.
        """
        if not isinstance(layout, StepLayout) or not layout.is_fused:
            return self._decoder.forward(rows_NH, layout, tap=tap, entering=entering)
        assert not entering, "fused kernels return no hidden states for a draft head"
        rows_NH, tapped = self.run_layers(rows_NH, partial(self._attend_pages, layout), tap=tap)
        return self._decoder.finish(rows_NH), tapped

    def trial(self, rows_NH: Tensor, layout: StepLayout) -> Tensor:
        """Run the first layers only, by which the two forms of a step are compared: [N, H]."""
        attend = partial(self._attend_pages, layout)
        if layout.is_fused:
            return self.run_layers(rows_NH, attend, stop=NUM_TRIAL_LAYERS)[0]
        return self._decoder.run_layers(rows_NH, layout, stop=NUM_TRIAL_LAYERS)[0]

    def head(self, rows_NH: Tensor, weight_VH: Tensor) -> Tensor:
        """Return the logits of rows to which the final norm was not yet applied: [N, V]."""
        return row_product(rows_NH, weight_VH, norm_H=self._decoder.norm, eps=self._eps)

    def _attend_pages(
        self, layout: StepLayout, number: int, qkv: Tensor, layer: LayerWeights
    ) -> Tensor:
        shape = self._decoder.shape
        return layout.attend_fused(
            number,
            qkv,
            HeadWeights(qk_norm_hd=layer.qk_norm, rope=self._decoder.rope, eps=shape.eps),
            AttentionParams(scale=shape.head_dim**-0.5),
        )

    def _mlp(self, number: int, layer: LayerWeights, rows_NH: Tensor) -> Tensor:
        mlp, norm_H = layer.mlp, layer.post_norm
        if isinstance(mlp, GatedMlp):
            return row_product(self._gate_up(mlp, rows_NH, norm_H), mlp.down, residual_NO=rows_NH)
        if isinstance(mlp.matrices, Fp8ExpertWeights):  # their products are kernels of their own
            return rows_NH + mlp(normed_rows(rows_NH, norm_H, self._eps))
        router = self._routers[number]
        assert router is not None
        logits = row_product(rows_NH, router, norm_H=norm_H, eps=self._eps)
        ids, weights, shared_gate = route(
            logits, mlp.num_chosen, mlp.normalise, mlp.shared is not None
        )
        acts = expert_gate_up(rows_NH, ids, mlp.matrices.gate_up, norm_H=norm_H, eps=self._eps)
        outs = expert_down(acts, ids, mlp.matrices.down)
        if mlp.shared is None:
            return combine_experts(outs, weights, rows_NH)
        shared = row_product(self._gate_up(mlp.shared, rows_NH, norm_H), mlp.shared.down)
        return combine_experts(outs, weights, rows_NH, shared, shared_gate)

    def _gate_up(self, mlp: GatedMlp, rows_NH: Tensor, norm_H: Tensor) -> Tensor:
        return row_product(rows_NH, mlp.gate_up, norm_H=norm_H, eps=self._eps, gated=True)


def _router(mlp: GatedMlp | SparseMlp) -> Tensor | None:
    """Return the weights of a layer's router, with the shared expert's gate as last row if there is
    one; None for a layer without experts.
    """
    if isinstance(mlp, GatedMlp):
        return None
    return mlp.router if mlp.shared_gate is None else torch.cat([mlp.router, mlp.shared_gate])
