"""An attention function for `transformers` modules that attends through Fleet's KV pages instead of
a `transformers` cache.

Source: transformers 5.23, `AttentionInterface`. For an attention implementation that it does not
know, `transformers` builds no mask, as required here. Legend: N positions, h query heads, k
key/value heads, d head size.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fleet.engine.torch.layout import AttentionParams, Layout
from fleet.models.causal_lm.rope import Rotaries

NAME = "fleet_paged"
LAYOUT = "fleet_layout"
"""Name of the keyword argument that carries a step's layout (positions and KV pages) from a model's
`forward` to its attention modules.
"""
IGNORED_KEYWORDS = {
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "use_cache",
}
"""Keyword arguments of attention that may be ignored here: nothing is trained, and keys and values
are read from pages.
"""


class Attention(Protocol):
    """Protocol of an attention module, with the only attribute that is used here."""

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
    """Compute the attention of one layer through the pages of `fleet_layout`. Has the signature of
    the attention functions of `transformers`.

    Shapes: query [1, h, N, d], key and value [1, k, N, d] -> [1, N, h, d]. `s_aux` [h]: attention
    sinks. Raises: ValueError for keyword arguments that would change the result and are not
    supported.
    """
    if fleet_layout is None:
        raise ValueError("it does not hand keywords down to its attention")
    unknown = [
        name for name, value in others.items() if value is not None and name not in IGNORED_KEYWORDS
    ]
    unknown += ["attention_mask"] if attention_mask is not None else []
    if unknown or others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(
            f"its attention asks for {', '.join(unknown) or 'what comes later in the text'}"
        )
    if key.shape != value.shape:
        raise ValueError("its keys and values differ in size")
    q_Nhd, kv_Nkd = query[0].transpose(0, 1), torch.cat([key[0], value[0]]).transpose(0, 1)
    scale = q_Nhd.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale=scale, window=sliding_window, softcap=softcap, sinks_h=s_aux)
    out = fleet_layout.attend(module.layer_idx, q_Nhd.contiguous(), kv_Nkd, params)
    return out.view(1, *q_Nhd.shape), None


def register() -> None:
    AttentionInterface.register(NAME, paged_attention)


def run_layers(body: nn.Module, rotaries: Rotaries, rows_NH: Tensor, layout: Layout) -> Tensor:
    """Run all layers and the final norm of `body`: embeddings [N, H] -> hidden states [N, H]."""
    with rotaries.scaled_for(layout):
        done = body(
            inputs_embeds=rows_NH[None],
            position_ids=layout.positions[None],
            use_cache=False,
            **{LAYOUT: layout},
        )
    return done.last_hidden_state[0]


class BodyStub(nn.Module):
    """Stand-in for a causal model's body that returns its input, so that the model's own code
    applies the output head to hidden states computed elsewhere.
    """

    @property
    def decoder(self) -> "BodyStub":
        """The stub itself, for models whose `forward` calls the body's decoder directly."""
        return self

    def forward(self, *_args: object, inputs_embeds: Tensor, **_: object) -> "BodyOutput":
        return BodyOutput(inputs_embeds)


class BodyOutput:
    """Output of a model's body that has `last_hidden_state` only; every other attribute is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
