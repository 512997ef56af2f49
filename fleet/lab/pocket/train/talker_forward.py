"""Faster forward pass with the parameters of the Talker of `transformers`, for training: no expert
routing, fewer and larger products.

The only expert always has weight 1, so it is a plain MLP beside the shared one; without images the
rotary embedding is the plain one. Positions may follow earlier ones (`Past`): a prefix in training,
all earlier input in generation.
Legend: B sequences, L positions, K keys (earlier positions, then L), h heads, d head size, H hidden
size, Q code groups, N frames.
Source: transformers 5.23, modeling_qwen3_omni_moe.py: `Qwen3OmniMoeTalkerModel`,
`Qwen3OmniMoeTalkerCodePredictorModel`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

from fleet.lab.pocket.shape import (
    CODEBOOK_SIZE,
    CODEC_IDS,
    HEAD_DIM,
    HIDDEN,
    NUM_CODE_GROUPS,
    ROPE_THETA,
    model_config,
)

EPSILON = 1e-6
SUPERVISED_LAYER = 2
SUPERVISED_HEADS = 2
NUM_FIRST = CODEBOOK_SIZE + 1
"""Number of choices for a frame's first code: all codes, and the end of speech with the index
`CODEBOOK_SIZE`.
"""


class Layer(NamedTuple):
    """Parameters of a decoder layer. `shared`: parameters of the shared expert (gate, up, down, own
    gate), or None.
    """

    norm_in: Tensor
    qkv: tuple[Tensor, Tensor, Tensor]
    norm_q: Tensor
    norm_k: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: tuple[Tensor, Tensor]
    down: Tensor
    shared: tuple[Tensor, Tensor, Tensor, Tensor] | None


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding. Shapes: [L, d]."""

    cos: Tensor
    sin: Tensor


class Keys(NamedTuple):
    """Keys and values of one layer for earlier positions, to which later positions attend. Shapes:
    [B, h, K, d].
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Keys and values of all earlier positions in every layer, to which later positions attend."""

    layers: tuple[Keys, ...]

    @property
    def num_rows(self) -> int:
        return self.layers[0].keys.shape[2]

    def repeated(self, times: int) -> "Past":
        """Return a copy with each sequence repeated `times` times."""
        return Past(
            layers=tuple(
                Keys(*(each.repeat_interleave(times, 0) for each in keys)) for keys in self.layers
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """Tensors of the decoder's middle layer that pointer supervision needs.

    Shapes: `into_BLH` and `out_BLH` are the layer's input and output, `scores_BhLK` the supervised
    heads' log attention.
    """

    into_BLH: Tensor
    out_BLH: Tensor
    scores_BhLK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Output of the Talker's decoder. `past`: keys and values of all positions so far. `tapped` is
    None unless requested. Shapes: `hidden_BLH` is normalized, as `generate` passes it to the code
    predictor.
    """

    hidden_BLH: Tensor
    past: Past
    tapped: Tapped | None


def new_talker(seed: int) -> nn.Module:
    """Return an initialized `Qwen3OmniMoeTalkerForConditionalGeneration` of Pocket's shape.

    `transformers` leaves the experts uninitialized. All audio positions have one trained vector,
    the last bias of `hidden_projection`, so that the answer's speech does not depend on the
    question's audio.
    """
    config = configuration_qwen3_omni_moe.Qwen3OmniMoeTalkerConfig(
        **model_config()["talker_config"]
    )
    talker = cast(Any, modeling_qwen3_omni_moe).Qwen3OmniMoeTalkerForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in talker.named_parameters():
        _initialise(name, parameter, generator)
        is_zero = "hidden_projection" in name and not name.endswith("fc2.bias")
        parameter.requires_grad_(not is_zero and not name.endswith("mlp.gate.weight"))
    return talker


@torch.no_grad()
def _initialise(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if parameter.ndim < 2:
        return
    deviation = parameter.shape[-1] ** -0.5
    if "codec_embedding" in name:
        deviation = 0.02
    elif "o_proj" in name or "down_proj" in name:
        deviation *= 0.3
    elif "text_projection.linear_fc2" in name:
        deviation *= 0.1
    elif "hidden_projection" in name or name.endswith("mlp.gate.weight"):
        deviation = 0.0
    parameter.normal_(0.0, 1.0, generator=generator).mul_(deviation)


def talker_layers(talker: nn.Module) -> list[Layer]:
    return [_layer(layer, *_expert(layer.mlp)) for layer in cast(Any, talker).model.layers]


def predictor_layers(talker: nn.Module) -> list[Layer]:
    layers = cast(Any, talker).code_predictor.model.layers
    return [
        _layer(
            layer,
            (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
            layer.mlp.down_proj.weight,
            None,
        )
        for layer in layers
    ]


def _expert(
    mlp: Any,
) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    gate, up = mlp.experts.gate_up_proj[0].chunk(2)
    shared = mlp.shared_expert
    weights = (
        shared.gate_proj.weight,
        shared.up_proj.weight,
        shared.down_proj.weight,
        mlp.shared_expert_gate.weight,
    )
    return (gate, up), mlp.experts.down_proj[0], weights


def _layer(
    layer: Any,
    gate_up: tuple[Tensor, Tensor],
    down: Tensor,
    shared: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> Layer:
    attention = layer.self_attn
    return Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        norm_q=attention.q_norm.weight,
        norm_k=attention.k_norm.weight,
        out=attention.o_proj.weight,
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=down,
        shared=shared,
    )


def rotation(start: int, length: int) -> Rotation:
    """Return the rotary embedding of `length` positions from `start` on."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(start, start + length)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return Rotation(angles.cos(), angles.sin())


def _rotated(x_BhLd: Tensor, rotation: Rotation) -> Tensor:
    first, second = x_BhLd.chunk(2, -1)
    return x_BhLd * rotation.cos + torch.cat([-second, first], -1) * rotation.sin


def _queries(layer: Layer, x_BLH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    rows = F.linear(F.rms_norm(x_BLH, (HIDDEN,), layer.norm_in, EPSILON), torch.cat(layer.qkv))
    query, key, value = rows.unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    query = _rotated(F.rms_norm(query, (HEAD_DIM,), layer.norm_q, EPSILON), rotation)
    return query, _rotated(F.rms_norm(key, (HEAD_DIM,), layer.norm_k, EPSILON), rotation), value


def _mix(layer: Layer, x_BLH: Tensor, attended_BhLd: Tensor, dropout: float) -> Tensor:
    rows = F.linear(attended_BhLd.transpose(1, 2).flatten(2), layer.out)
    x_BLH = _add_with_dropout(x_BLH, rows, dropout)
    return _add_with_dropout(
        x_BLH, _mlp(layer, F.rms_norm(x_BLH, (HIDDEN,), layer.norm_mlp, EPSILON)), dropout
    )


def _add_with_dropout(x_BLH: Tensor, rows_BLH: Tensor, dropout: float) -> Tensor:
    """Add `rows_BLH` with dropout. All positions of a sequence share a mask, which costs a seventh
    of a mask per position.
    """
    if dropout == 0:
        return x_BLH + rows_BLH
    mask = F.dropout(torch.ones(len(x_BLH), 1, HIDDEN), dropout)
    return torch.addcmul(x_BLH, rows_BLH, mask)


def _mlp(layer: Layer, x_BLH: Tensor) -> Tensor:
    if layer.shared is None:
        gate, up = F.linear(x_BLH, torch.cat(layer.gate_up)).chunk(2, -1)
        return F.linear(F.silu(gate) * up, layer.down)
    shared_gate, shared_up, shared_down, opening = layer.shared
    both = torch.cat([layer.gate_up[0], shared_gate, layer.gate_up[1], shared_up])
    gate, up = F.linear(x_BLH, both).chunk(2, -1)
    expert, shared = (F.silu(gate) * up).split([layer.down.shape[1], shared_down.shape[1]], -1)
    opened = torch.sigmoid(F.linear(x_BLH, opening))
    return F.linear(
        torch.cat([expert, shared * opened], -1), torch.cat([layer.down, shared_down], 1)
    )


class Lean:
    """Lean forward pass of one Talker: computes with the module's own parameters, without expert
    routing, and with fewer and larger products than the Talker of `transformers`.
    """

    def __init__(self, talker: nn.Module) -> None:
        self._talker = cast(Any, talker)

    def trunk(
        self, rows_BLH: Tensor, past: Past | None = None, *, dropout: float = 0.0, tap: bool = False
    ) -> Trunk:
        """Compute the decoder over positions that follow `past`, with causal attention. `tap`: also
        return the tensors for pointer supervision.
        """
        num_past = 0 if past is None else past.num_rows
        at, bias_LK = (
            rotation(num_past, rows_BLH.shape[1]),
            _causal_bias(num_past, rows_BLH.shape[1]),
        )
        x_BLH, layers, tapped = rows_BLH, list[Keys](), None
        for index, layer in enumerate(talker_layers(self._talker)):
            query, key, value = _queries(layer, x_BLH, at)
            if past is not None:
                key, value = (
                    torch.cat(pair, 2)
                    for pair in zip(past.layers[index], (key, value), strict=True)
                )
            layers.append(Keys(key, value))
            scores = _scores(query, key, bias_LK)
            into_BLH, x_BLH = x_BLH, _mix(layer, x_BLH, scores.softmax(-1) @ value, dropout)
            if tap and index == SUPERVISED_LAYER:
                supervised = scores[:, :SUPERVISED_HEADS].log_softmax(-1)
                tapped = Tapped(into_BLH=into_BLH, out_BLH=x_BLH, scores_BhLK=supervised)
        hidden = F.rms_norm(x_BLH, (HIDDEN,), self._talker.model.norm.weight, EPSILON)
        return Trunk(hidden_BLH=hidden, past=Past(layers=tuple(layers)), tapped=tapped)

    def first_logits(self, hidden_BLH: Tensor) -> Tensor:
        """Return the logits [..., NUM_FIRST] of a frame's first code."""
        weight = self._talker.codec_head.weight
        return F.linear(
            hidden_BLH,
            torch.cat([weight[:CODEBOOK_SIZE], weight[CODEC_IDS.eos : CODEC_IDS.eos + 1]]),
        )

    def residual_logits(
        self, hidden_NH: Tensor, codes_Nq: Tensor, *, dropout: float = 0.0
    ) -> list[Tensor]:
        """Return for each of the first q codes the logits [N, CODEBOOK_SIZE] of the code after
        it.
        """
        tables = self._code_tables()
        rows = [
            hidden_NH,
            *(
                F.embedding(codes, table)
                for codes, table in zip(codes_Nq.unbind(1), tables, strict=False)
            ),
        ]
        x_NqH = torch.stack(rows, 1)
        at, bias_qq = rotation(0, x_NqH.shape[1]), _causal_bias(0, x_NqH.shape[1])
        for layer in predictor_layers(self._talker):
            query, key, value = _queries(layer, x_NqH, at)
            x_NqH = _mix(layer, x_NqH, _scores(query, key, bias_qq).softmax(-1) @ value, dropout)
        predictor = self._talker.code_predictor
        x_NqH = F.rms_norm(x_NqH, (HIDDEN,), predictor.model.norm.weight, EPSILON)[:, 1:]
        return [
            F.linear(x_NH, head.weight)
            for x_NH, head in zip(x_NqH.unbind(1), predictor.lm_head, strict=False)
        ]

    def code_embeddings(self, codes_BTQ: Tensor, only_first_BT: Tensor | None = None) -> Tensor:
        """Return the sum [B, T, H] of each frame's code embeddings. Where `only_first_BT` is True,
        only the first code is embedded.
        """
        table = torch.cat(
            [*self._code_tables(), self._talker.model.codec_embedding.weight.new_zeros(1, HIDDEN)]
        )
        index = codes_BTQ + torch.arange(NUM_CODE_GROUPS) * CODEBOOK_SIZE
        if only_first_BT is not None:
            index[..., 1:].masked_fill_(only_first_BT[..., None], len(table) - 1)
        return F.embedding_bag(index.flatten(0, 1), table, mode="sum").unflatten(
            0, codes_BTQ.shape[:2]
        )

    def control_embeddings(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._talker.model.codec_embedding.weight)

    def text_embeddings(self, table_VH: Tensor) -> Tensor:
        """Return the Talker's embedding [V + 1, H] of the text side, from the text table. The last
        row is for audio positions.
        """
        text = self._talker.text_projection(table_VH)
        return torch.cat([text, self._talker.hidden_projection(text.new_zeros(1, HIDDEN))])

    def _code_tables(self) -> list[Tensor]:
        first = self._talker.model.codec_embedding.weight[:CODEBOOK_SIZE]
        return [first, *(each.weight for each in self._talker.code_predictor.model.codec_embedding)]


def _causal_bias(num_past: int, num_rows: int) -> Tensor:
    """Return the bias [L, K] of the attention scores: minus infinity where a key is later than the
    position.
    """
    return torch.full((num_rows, num_past + num_rows), -torch.inf).triu(num_past + 1)


def _scores(query: Tensor, key: Tensor, bias_LK: Tensor) -> Tensor:
    # Not the fused attention: at these sizes it is slower on a CPU, and it does not return the
    # scores for supervision.
    return query * HEAD_DIM**-0.5 @ key.transpose(-1, -2) + bias_LK
