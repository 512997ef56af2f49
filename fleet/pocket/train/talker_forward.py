"""A lean forward over the parameters of the Talker of `transformers`, for training: no routing, fewer and larger products.

One expert always has weight 1, so it is a plain MLP beside the shared one; nothing is seen, so the rotary embedding is the plain
one. Rows may follow others (`Past`): a prefix in training, everything fed before when speaking.
Legend: B sequences, L rows, K keys (those before, then L), h heads, d head size, H hidden size, Q code groups, N frames.
Knows neither batches nor losses.
Source: transformers 5.23, modeling_qwen3_omni_moe.py: `Qwen3OmniMoeTalkerModel`, `Qwen3OmniMoeTalkerCodePredictorModel`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

from fleet.pocket.shape import CODEBOOK_SIZE, CODEC_IDS, HEAD_DIM, HIDDEN, NUM_CODE_GROUPS, ROPE_THETA, model_config

EPSILON = 1e-6
SUPERVISED_LAYER = 2
SUPERVISED_HEADS = 2
NUM_FIRST = CODEBOOK_SIZE + 1
"""What `generate` may draw as a frame's first code: a code, or the end, which is numbered `CODEBOOK_SIZE` here."""


class Layer(NamedTuple):
    """The parameters of a decoder layer. `shared`: of the shared expert (gate and up, down, its own gate), or none."""

    norm_in: Tensor
    qkv: tuple[Tensor, Tensor, Tensor]
    norm_q: Tensor
    norm_k: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: tuple[Tensor, Tensor]
    down: Tensor
    shared: tuple[Tensor, Tensor, Tensor, Tensor] | None


class Turns(NamedTuple):
    """Cosines and sines of the rotary embedding. Shapes: [L, d]."""

    cos: Tensor
    sin: Tensor


class Keys(NamedTuple):
    """What later rows attend to in one layer. Shapes: [B, h, K, d]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The rows before, in every layer; all of them are seen."""

    layers: tuple[Keys, ...]

    @property
    def num_rows(self) -> int:
        return self.layers[0].keys.shape[2]

    def repeated(self, times: int) -> "Past":
        """Each sequence's rows, `times` over."""
        return Past(layers=tuple(Keys(*(each.repeat_interleave(times, 0) for each in keys)) for keys in self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """What the supervision of the middle layer looks at.

    Shapes: `into_BLH` and `out_BLH` are the layer's input and output, `scores_BhLK` the supervised heads' log attention.
    """

    into_BLH: Tensor
    out_BLH: Tensor
    scores_BhLK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Shapes: `hidden_BLH` is normed, as `generate` hands it to the code predictor."""

    hidden_BLH: Tensor
    past: Past
    tapped: Tapped | None


def new_talker(seed: int) -> nn.Module:
    """`Qwen3OmniMoeTalkerForConditionalGeneration` of Pocket's shape, ready to train.

    `transformers` leaves the experts as the memory was. Every audio row is one trained vector, the last bias of
    `hidden_projection`: the Talker is not to hear how the question sounded.
    """
    config = configuration_qwen3_omni_moe.Qwen3OmniMoeTalkerConfig(**model_config()["talker_config"])
    talker = cast(Any, modeling_qwen3_omni_moe).Qwen3OmniMoeTalkerForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in talker.named_parameters():
        _draw(name, parameter, generator)
        silent = "hidden_projection" in name and not name.endswith("fc2.bias")
        parameter.requires_grad_(not silent and not name.endswith("mlp.gate.weight"))
    return talker


@torch.no_grad()
def _draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
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
        _layer(layer, (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight), layer.mlp.down_proj.weight, None)
        for layer in layers
    ]


def _expert(mlp: Any) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    gate, up = mlp.experts.gate_up_proj[0].chunk(2)
    shared = mlp.shared_expert
    weights = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight, mlp.shared_expert_gate.weight)
    return (gate, up), mlp.experts.down_proj[0], weights


def _layer(
    layer: Any, gate_up: tuple[Tensor, Tensor], down: Tensor, shared: tuple[Tensor, Tensor, Tensor, Tensor] | None
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


def turns(start: int, length: int) -> Turns:
    """Of rows `start` up to `start + length`."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(start, start + length)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return Turns(angles.cos(), angles.sin())


def _turned(x_BhLd: Tensor, turns: Turns) -> Tensor:
    first, second = x_BhLd.chunk(2, -1)
    return x_BhLd * turns.cos + torch.cat([-second, first], -1) * turns.sin


def _queries(layer: Layer, x_BLH: Tensor, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
    rows = F.linear(F.rms_norm(x_BLH, (HIDDEN,), layer.norm_in, EPSILON), torch.cat(layer.qkv))
    query, key, value = rows.unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    query = _turned(F.rms_norm(query, (HEAD_DIM,), layer.norm_q, EPSILON), turns)
    return query, _turned(F.rms_norm(key, (HEAD_DIM,), layer.norm_k, EPSILON), turns), value


def _mixed(layer: Layer, x_BLH: Tensor, attended_BhLd: Tensor, dropout: float) -> Tensor:
    rows = F.linear(attended_BhLd.transpose(1, 2).flatten(2), layer.out)
    x_BLH = _added(x_BLH, rows, dropout)
    return _added(x_BLH, _mlp(layer, F.rms_norm(x_BLH, (HIDDEN,), layer.norm_mlp, EPSILON)), dropout)


def _added(x_BLH: Tensor, rows_BLH: Tensor, dropout: float) -> Tensor:
    """What is dropped of a sequence is dropped in all its rows: a seventh of the cost of a draw for each."""
    if dropout == 0:
        return x_BLH + rows_BLH
    kept = F.dropout(torch.ones(len(x_BLH), 1, HIDDEN), dropout)
    return torch.addcmul(x_BLH, rows_BLH, kept)


def _mlp(layer: Layer, x_BLH: Tensor) -> Tensor:
    if layer.shared is None:
        gate, up = F.linear(x_BLH, torch.cat(layer.gate_up)).chunk(2, -1)
        return F.linear(F.silu(gate) * up, layer.down)
    shared_gate, shared_up, shared_down, opening = layer.shared
    both = torch.cat([layer.gate_up[0], shared_gate, layer.gate_up[1], shared_up])
    gate, up = F.linear(x_BLH, both).chunk(2, -1)
    expert, shared = (F.silu(gate) * up).split([layer.down.shape[1], shared_down.shape[1]], -1)
    opened = torch.sigmoid(F.linear(x_BLH, opening))
    return F.linear(torch.cat([expert, shared * opened], -1), torch.cat([layer.down, shared_down], 1))


class Lean:
    """The forward of one Talker."""

    def __init__(self, talker: nn.Module) -> None:
        self._talker = cast(Any, talker)

    def trunk(self, rows_BLH: Tensor, past: Past | None = None, *, dropout: float = 0.0, tap: bool = False) -> Trunk:
        """Rows after `past`, each seeing itself and all that are ahead of it."""
        num_past = 0 if past is None else past.num_rows
        at, hidden_LK = turns(num_past, rows_BLH.shape[1]), _not_seen(num_past, rows_BLH.shape[1])
        x_BLH, kept, tapped = rows_BLH, list[Keys](), None
        for index, layer in enumerate(talker_layers(self._talker)):
            query, key, value = _queries(layer, x_BLH, at)
            if past is not None:
                key, value = (torch.cat(pair, 2) for pair in zip(past.layers[index], (key, value), strict=True))
            kept.append(Keys(key, value))
            scores = _scores(query, key, hidden_LK)
            into_BLH, x_BLH = x_BLH, _mixed(layer, x_BLH, scores.softmax(-1) @ value, dropout)
            if tap and index == SUPERVISED_LAYER:
                supervised = scores[:, :SUPERVISED_HEADS].log_softmax(-1)
                tapped = Tapped(into_BLH=into_BLH, out_BLH=x_BLH, scores_BhLK=supervised)
        hidden = F.rms_norm(x_BLH, (HIDDEN,), self._talker.model.norm.weight, EPSILON)
        return Trunk(hidden_BLH=hidden, past=Past(layers=tuple(kept)), tapped=tapped)

    def first_logits(self, hidden_BLH: Tensor) -> Tensor:
        """[..., NUM_FIRST]."""
        weight = self._talker.codec_head.weight
        return F.linear(hidden_BLH, torch.cat([weight[:CODEBOOK_SIZE], weight[CODEC_IDS.eos : CODEC_IDS.eos + 1]]))

    def residual_logits(self, hidden_NH: Tensor, codes_Nq: Tensor, *, dropout: float = 0.0) -> list[Tensor]:
        """The logits [N, CODEBOOK_SIZE] of the code after each of the first q, which are given."""
        tables = self._code_tables()
        rows = [hidden_NH, *(F.embedding(codes, table) for codes, table in zip(codes_Nq.unbind(1), tables, strict=False))]
        x_NqH = torch.stack(rows, 1)
        at, hidden_qq = turns(0, x_NqH.shape[1]), _not_seen(0, x_NqH.shape[1])
        for layer in predictor_layers(self._talker):
            query, key, value = _queries(layer, x_NqH, at)
            x_NqH = _mixed(layer, x_NqH, _scores(query, key, hidden_qq).softmax(-1) @ value, dropout)
        predictor = self._talker.code_predictor
        x_NqH = F.rms_norm(x_NqH, (HIDDEN,), predictor.model.norm.weight, EPSILON)[:, 1:]
        return [F.linear(x_NH, head.weight) for x_NH, head in zip(x_NqH.unbind(1), predictor.lm_head, strict=False)]

    def code_rows(self, codes_BTQ: Tensor, only_first_BT: Tensor | None = None) -> Tensor:
        """[B, T, H]: the sum of each frame's code embeddings, or where `only_first_BT` that of the first code alone."""
        table = torch.cat([*self._code_tables(), self._talker.model.codec_embedding.weight.new_zeros(1, HIDDEN)])
        index = codes_BTQ + torch.arange(NUM_CODE_GROUPS) * CODEBOOK_SIZE
        if only_first_BT is not None:
            index[..., 1:].masked_fill_(only_first_BT[..., None], len(table) - 1)
        return F.embedding_bag(index.flatten(0, 1), table, mode="sum").unflatten(0, codes_BTQ.shape[:2])

    def control_rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._talker.model.codec_embedding.weight)

    def text_rows(self, table_VH: Tensor) -> Tensor:
        """[V + 1, H]: what each id of the text side is to the Talker; the last row is any position of audio."""
        text = self._talker.text_projection(table_VH)
        return torch.cat([text, self._talker.hidden_projection(text.new_zeros(1, HIDDEN))])

    def _code_tables(self) -> list[Tensor]:
        first = self._talker.model.codec_embedding.weight[:CODEBOOK_SIZE]
        return [first, *(each.weight for each in self._talker.code_predictor.model.codec_embedding)]


def _not_seen(num_past: int, num_rows: int) -> Tensor:
    """[L, K]: what is added to scores, minus infinity where a key comes later."""
    return torch.full((num_rows, num_past + num_rows), -torch.inf).triu(num_past + 1)


def _scores(query: Tensor, key: Tensor, hidden_LK: Tensor) -> Tensor:
    # Written out: at these sizes it is faster on a CPU than the fused attention, whose scores nobody could supervise.
    return query * HEAD_DIM**-0.5 @ key.transpose(-1, -2) + hidden_LK
