"""The attention function that `transformers` modules call here: it looks back through the pass's pages instead of a cache.

Source: transformers 5.23, `AttentionInterface`. An unknown implementation gets no mask built, which is what we want.
Legend: N rows, h query heads, k key/value heads, d head size.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fleet.engine.torch.layout import AttentionParams, Layout

NAME = "fleet_paged"
LAYOUT = "fleet_layout"
"""The keyword that carries the pass's layout from a model's `forward` down to its attention."""
OF_NO_EFFECT = {
    "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
    "position_ids", "use_cache",
}  # fmt: skip
"""What modules hand to any attention, and what changes nothing here: nothing is trained, and rows look back at pages."""


class Attention(Protocol):
    """What is read of an attention module."""

    layer_idx: int


def paged_attention(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    fleet_layout: Layout | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Shapes: query [1, h, N, d], key and value [1, k, N, d] -> [1, N, h, d]. `s_aux` [h] are attention sinks.

    Raises: ValueError for what would change the result and is not served.
    """
    if fleet_layout is None:
        raise ValueError("it does not hand keywords down to its attention")
    unknown = [name for name, value in others.items() if value is not None and name not in OF_NO_EFFECT]
    unknown += ["attention_mask"] if attention_mask is not None else []
    if unknown or others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"its attention asks for {', '.join(unknown) or 'what comes later in the text'}")
    if key.shape != value.shape:
        raise ValueError("its keys and values differ in size")
    q_Nhd, kv_Nkd = query[0].transpose(0, 1), torch.cat([key[0], value[0]]).transpose(0, 1)
    scale = q_Nhd.shape[-1] ** -0.5 if scaling is None else scaling
    look = AttentionParams(scale=scale, window=sliding_window, softcap=softcap, sinks_h=s_aux)
    out = fleet_layout.attend(module.layer_idx, q_Nhd.contiguous(), kv_Nkd, look)
    return out.view(1, *q_Nhd.shape), None


def register() -> None:
    AttentionInterface.register(NAME, paged_attention)


class BodyStub(nn.Module):
    """Stands in for a causal model's body, so that the model's own code runs its head on hidden rows made elsewhere."""

    @property
    def decoder(self) -> "BodyStub":
        """Some heads go past the body to its decoder."""
        return self

    def forward(self, *_args: object, inputs_embeds: Tensor, **_: object) -> "BodyOutput":
        return BodyOutput(inputs_embeds)


class BodyOutput:
    """The output of a body: hidden rows, and nothing else of what a body may put out."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
