"""The attention function that `transformers` modules call here: it looks back through the pass's pages instead of a cache.

Source: transformers 5.23, `AttentionInterface`. An unknown implementation gets no mask built, which is what we want.
Legend: N rows, h query heads, k key/value heads, d head size.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fleet.engine.torch.layout import Layout, Look

NAME = "fleet_paged"
LAYOUT = "fleet_layout"
"""The keyword that carries the pass's layout from a model's `forward` down to its attention."""


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
    fleet_layout: Layout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Shapes: query [1, h, N, d], key and value [1, k, N, d] -> [1, N, h, d]."""
    assert fleet_layout is not None, "the architecture does not hand keywords down to its attention"
    q_Nhd, kv_Nkd = query[0].transpose(0, 1), torch.cat([key[0], value[0]]).transpose(0, 1)
    look = Look(scale=scaling or q_Nhd.shape[-1] ** -0.5, window=sliding_window, softcap=softcap)
    out = fleet_layout.attend(module.layer_idx, q_Nhd.contiguous(), kv_Nkd, look)
    return out.view(1, *q_Nhd.shape), None


def register() -> None:
    AttentionInterface.register(NAME, paged_attention)


class GivenHidden(nn.Module):
    """Stands in for a causal model's body, so that the model's own code runs its head on hidden rows made elsewhere."""

    def forward(self, inputs_embeds: Tensor, **_: object) -> "Given":
        return Given(inputs_embeds)


class Given:
    """The output of a body: hidden rows, and nothing else of what a body may put out."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
