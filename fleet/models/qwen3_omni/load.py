"""Loading of decoder weights from a Qwen3-Omni folder. Experts may be stored one by one or fused.

Source: transformers 5.23, configuration_qwen3_omni_moe.py and the keys of published checkpoints.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fleet.core.errors import ConfigError
from fleet.engine.torch.experts import Experts, ExpertWeights
from fleet.engine.torch.fp8_experts import Fp8ExpertWeights, quantized_stack
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.config import TextConfig
from fleet.models.qwen3_omni.decoder import (
    Decoder,
    DecoderShape,
    GatedMlp,
    LayerWeights,
    SparseMlp,
    rope_table,
)
from fleet.spans.protocol.layers import LayerSpan

THINKER_TEXT = ("thinker.model.layers.", "thinker.model.language_model.layers.")
THINKER_EMBEDDING = (
    "thinker.model.embed_tokens.weight",
    "thinker.model.language_model.embed_tokens.weight",
)
EXPERTS = ".mlp.experts."
"""Part of the name of each matrix of an expert."""
AUDIO_TOWER = ("thinker.audio_tower.", "thinker.model.audio_tower.")
SCALED_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary embeddings that depend on the length of the whole text, so that no table by
position can hold them.
"""


def load_decoder(
    reader: WeightReader,
    prefix: str,
    config: TextConfig,
    experts: Experts,
    num_positions: int,
    span: LayerSpan | None = None,
    *,
    with_norm: bool = True,
) -> Decoder:
    """Load the layers of a decoder, or only a span of them. `prefix`: name of the layers' weights
    up to the layer number; `experts`: function that computes mixture-of-experts layers;
    `num_positions`: positions in the rotary embedding table; `with_norm`: load the final norm too.
    """
    shape = DecoderShape(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )
    numbers = range(config.num_hidden_layers) if span is None else range(span.first, span.final + 1)
    layers = [
        _load_layer(reader, f"{prefix}{number}.", shape, config, experts) for number in numbers
    ]
    norm = reader.get(norm_beside(prefix)) if with_norm else None
    rope = _rope(config, num_positions, layers[0].input_norm)
    return Decoder(shape, layers, norm, rope, first=numbers.start)


def norm_beside(prefix: str) -> str:
    """Return the name of a decoder's final norm. `prefix`: name of the layers' weights up to the
    layer number.
    """
    return prefix.removesuffix("layers.") + "norm.weight"


def _load_layer(
    reader: WeightReader, prefix: str, shape: DecoderShape, config: TextConfig, experts: Experts
) -> LayerWeights:
    attention = prefix + "self_attn."
    projections = [f"{attention}{name}_proj" for name in "qkv"]
    q_norm, k_norm = (
        reader.get(attention + "q_norm.weight"),
        reader.get(attention + "k_norm.weight"),
    )
    has_bias = reader.has(projections[0] + ".bias")
    return LayerWeights(
        input_norm=reader.get(prefix + "input_layernorm.weight"),
        qkv=reader.joined([name + ".weight" for name in projections]),
        qkv_bias=reader.joined([name + ".bias" for name in projections]) if has_bias else None,
        qk_norm=torch.cat(
            [q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)]
        ),
        out=reader.get(attention + "o_proj.weight"),
        post_norm=reader.get(prefix + "post_attention_layernorm.weight"),
        mlp=_load_mlp(reader, prefix + "mlp.", config, experts),
    )


def _load_mlp(
    reader: WeightReader, prefix: str, config: TextConfig, experts: Experts
) -> GatedMlp | SparseMlp:
    if not reader.has(prefix + "gate.weight"):
        return _load_gated(reader, prefix)
    has_shared = reader.has(prefix + "shared_expert_gate.weight")
    return SparseMlp(
        router=reader.get(prefix + "gate.weight"),
        matrices=(_load_fp8_experts if reader.fp8_experts else _load_experts)(
            reader, prefix + "experts.", getattr(config, "num_experts", 0)
        ),
        num_chosen=getattr(config, "num_experts_per_tok", 1),
        normalise=getattr(config, "norm_topk_prob", True),
        experts=experts,
        shared=_load_gated(reader, prefix + "shared_expert.") if has_shared else None,
        shared_gate=reader.get(prefix + "shared_expert_gate.weight") if has_shared else None,
    )


def _load_gated(reader: WeightReader, prefix: str) -> GatedMlp:
    return GatedMlp(
        gate_up=reader.joined([prefix + "gate_proj.weight", prefix + "up_proj.weight"]),
        down=reader.get(prefix + "down_proj.weight"),
    )


def _load_experts(reader: WeightReader, prefix: str, num_experts: int) -> ExpertWeights:
    if reader.has(prefix + "gate_up_proj"):
        return ExpertWeights(
            gate_up=reader.get(prefix + "gate_up_proj"), down=reader.get(prefix + "down_proj")
        )
    width, hidden = reader.shape(f"{prefix}0.gate_proj.weight")
    gate_up = reader.empty((num_experts, 2, width, hidden))
    for number, (gate, up) in enumerate(gate_up):
        reader.read_into(gate, f"{prefix}{number}.gate_proj.weight")
        reader.read_into(up, f"{prefix}{number}.up_proj.weight")
    down = reader.stacked([f"{prefix}{number}.down_proj.weight" for number in range(num_experts)])
    return ExpertWeights(gate_up=gate_up.flatten(1, 2), down=down)


def _load_fp8_experts(reader: WeightReader, prefix: str, num_experts: int) -> Fp8ExpertWeights:
    """Load the experts of a layer rounded to e4m3, one after another: memory beside the result is
    a few matrices of one expert.
    """
    gate_up, down = _expert_by_expert(reader, prefix, num_experts)
    rounded_gate_up, gate_up_scale = quantized_stack(gate_up, num_experts)
    rounded_down, down_scale = quantized_stack(down, num_experts)
    reader.rounded += [rounded_gate_up, gate_up_scale, rounded_down, down_scale]
    return Fp8ExpertWeights(
        gate_up=rounded_gate_up,
        gate_up_scale=gate_up_scale,
        down=rounded_down,
        down_scale=down_scale,
    )


def _expert_by_expert(
    reader: WeightReader, prefix: str, num_experts: int
) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """Return readers of the matrices `gate_up` and `down` of each expert of a layer in turn."""
    if reader.has(prefix + "gate_up_proj"):
        return reader.parts(prefix + "gate_up_proj"), reader.parts(prefix + "down_proj")
    names = [f"{prefix}{number}." for number in range(num_experts)]
    return (
        (reader.joined([f"{name}gate_proj.weight", f"{name}up_proj.weight"]) for name in names),
        (reader.get(f"{name}down_proj.weight") for name in names),
    )


def _rope(config: TextConfig, num_positions: int, like: Tensor) -> Tensor:
    parameters: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    kind = str(parameters.get("rope_type", "default"))
    if kind == "default":
        theta = float(str(parameters["rope_theta"]))
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        return rope_table((1.0 / theta**steps).to(like.device), 1.0, num_positions, like.dtype)
    if kind in SCALED_BY_LENGTH:
        raise ConfigError(
            f"checkpoint: rope_type {kind!r}, which depends on the length of the text, is not "
            "implemented "
            "for this model; use 'default', or give another checkpoint",
            param="checkpoint",
        )
    initialise: Callable[..., tuple[Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
    inv_freq, scaling = initialise(config, like.device)
    return rope_table(inv_freq, scaling, num_positions, like.dtype)
