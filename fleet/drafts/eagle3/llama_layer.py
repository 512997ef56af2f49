"""Weight names and settings of a Llama decoder layer, as which the formats of other programs
describe a draft head.

Names of weights are checked in both directions. An unknown setting may change the result, as
`norm_output` does, and is refused by name.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import Eagle3Config, check_names
from fleet.drafts.eagle3.files import build_head, parse_weights, read_bytes, write_whole
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.vocabulary import ids_of, mask_of, offsets_of

WITHOUT_EFFECT = frozenset(
    "architectures model_type torch_dtype dtype transformers_version initializer_range "
    "use_cache pretraining_tp bos_token_id "
    "eos_token_id pad_token_id attention_dropout max_window_layers _attn_implementation "
    "_name_or_path name_or_path "
    "chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions "
    "output_hidden_states problem_type "
    "return_dict".split()
)
"""Settings of `transformers` that do not change what a layer computes, and are ignored."""
FIXED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
    "logit_scale": 1.0,
}
"""Settings that a file may contain, with the only value that Fleet's draft head supports."""
SIZES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
"""Setting of `transformers` for each field of `Eagle3Config`."""
ROPE = ("rope_theta", "rope_parameters")
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def write_folder(folder: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a head's weights and settings to `folder`, which is created; the settings file is
    written last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS_FILE, save(dict(weights), metadata={"format": "pt"}))
    write_whole(folder / CONFIG_FILE, (json.dumps(settings, indent=2) + "\n").encode())


def read_head(
    folder: Path,
    config: Eagle3Config,
    layer: str,
    *,
    embedding_VH: Tensor | None,
    device: torch.device | None,
) -> Eagle3Head:
    """Read a head's weights from a folder in another program's format.

    `config`: configuration, already read. `layer`: prefix of the layer's weight names.
    `embedding_VH`: the target's embedding, to compare with a stored one. Raises: ConfigError with
    the name of a weight that is missing, unknown, of another shape, or not the target's.
    """
    path = folder / WEIGHTS_FILE
    weights = parse_weights(read_bytes(path), path)
    check_embedding(weights, embedding_VH, str(path))
    vocabulary_D = take_vocabulary(weights, config.vocab_size, config.draft_vocab_size, str(path))
    return build_head(
        config, vocabulary_D, own_weights(weights, layer, str(path)), str(path), device=device
    )


def layer_settings(config: Eagle3Config) -> dict[str, Any]:
    """Return a head's configuration as settings of a Llama layer. The rotary base is written in the
    ways of both transformers 4 and 5.
    """
    return {
        "model_type": "llama",
        **{setting: getattr(config, field) for field, setting in SIZES.items()},
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": config.dtype,
    }


def fields_of(
    settings: Mapping[str, Any], also_known: Iterable[str], source: str
) -> dict[str, Any]:
    """Return the fields of `Eagle3Config` that a layer's settings determine.

    `also_known`: names of settings that the caller reads. `source`: name of the file in errors.
    Raises: ConfigError with the name of a setting that is missing, unknown, or has an unsupported
    value.
    """
    check_known(settings, {*SIZES.values(), *FIXED, *ROPE, "head_dim", *also_known}, source)
    check_fixed(settings, FIXED, source)
    if settings.get("model_type", "llama") != "llama":
        raise ConfigError(
            f"{source}: model_type {settings['model_type']}, only llama can be read",
            param="model_type",
        )
    missing = [name for name in SIZES.values() if settings.get(name) is None]
    if missing:
        raise ConfigError(
            f"{source}: no field {missing[0]} ({len(missing)} missing)", param=missing[0]
        )
    fields = {field: settings[setting] for field, setting in SIZES.items()}
    head_dim = settings.get("head_dim") or fields["hidden_size"] // fields["num_heads"]
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    return fields | {
        "head_dim": head_dim,
        "rope_theta": _rope_theta(settings, source),
        "dtype": dtype,
    }


def check_known(settings: Mapping[str, Any], known: Iterable[str], source: str) -> None:
    """Check that every setting is in `known` or in `WITHOUT_EFFECT`.

    Raises: ConfigError with the name of an unknown setting.
    """
    unknown = sorted(set(settings) - WITHOUT_EFFECT - set(known))
    if unknown:
        raise ConfigError(
            f"{source}: unknown field {unknown[0]} ({len(unknown)} unknown), which may change "
            "what the head computes",
            param=unknown[0],
        )


def check_fixed(settings: Mapping[str, Any], fixed: Mapping[str, Any], source: str) -> None:
    """Check that each setting in `fixed` is missing, None, or has the value given there.

    Raises: ConfigError with the name of a setting that differs.
    """
    for name, value in fixed.items():
        given = settings.get(name, value)
        if given != value and given is not None:
            raise ConfigError(
                f"{source}: {name} is {given}, this head computes {value} only", param=name
            )


def _rope_theta(settings: Mapping[str, Any], source: str) -> float:
    parameters = dict(cast("Mapping[str, Any]", settings.get("rope_parameters") or {}))
    kind = parameters.pop("rope_type", "default")
    inner = parameters.pop("rope_theta", None)
    if kind != "default" or parameters:
        raise ConfigError(
            f"{source}: rope_parameters {settings['rope_parameters']}: only the default kind",
            param="rope_parameters",
        )
    given = {float(theta) for theta in (inner, settings.get("rope_theta")) if theta is not None}
    if len(given) != 1:
        raise ConfigError(
            f"{source}: rope_theta is missing, or given twice with two values", param="rope_theta"
        )
    return given.pop()


def named_weights(
    config: Eagle3Config, weights: Mapping[str, Tensor], layer: str
) -> dict[str, Tensor]:
    """Return a head's weights under the names of other programs. `layer`: prefix of the layer's
    names.
    """
    q, k, v = weights["qkv"].split(_qkv_heights(config))
    gate, up = weights["gate_up"].chunk(2)
    named = {
        "fc.weight": weights["fc"],
        f"{layer}.input_layernorm.weight": weights["embedding_norm"],
        f"{layer}.hidden_norm.weight": weights["hidden_norm"],
        f"{layer}.post_attention_layernorm.weight": weights["post_norm"],
        f"{layer}.self_attn.q_proj.weight": q,
        f"{layer}.self_attn.k_proj.weight": k,
        f"{layer}.self_attn.v_proj.weight": v,
        f"{layer}.self_attn.o_proj.weight": weights["out"],
        f"{layer}.mlp.gate_proj.weight": gate,
        f"{layer}.mlp.up_proj.weight": up,
        f"{layer}.mlp.down_proj.weight": weights["down"],
        "norm.weight": weights["norm"],
        "lm_head.weight": weights["lm_head"],
    }
    return {name: weight.contiguous() for name, weight in named.items()}


def own_weights(named: Mapping[str, Tensor], layer: str, source: str) -> dict[str, Tensor]:
    """Return the weights by the head's own names: the reverse of `named_weights`.

    Raises: ConfigError with the name of a weight that is missing or unknown.
    """
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    parts = {
        "fc": ["fc.weight"],
        "embedding_norm": [f"{layer}.input_layernorm.weight"],
        "hidden_norm": [f"{layer}.hidden_norm.weight"],
        "post_norm": [f"{layer}.post_attention_layernorm.weight"],
        "qkv": [
            f"{attention}.q_proj.weight",
            f"{attention}.k_proj.weight",
            f"{attention}.v_proj.weight",
        ],
        "out": [f"{attention}.o_proj.weight"],
        "gate_up": [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"],
        "down": [f"{mlp}.down_proj.weight"],
        "norm": ["norm.weight"],
        "lm_head": ["lm_head.weight"],
    }
    check_names(named, [name for names in parts.values() for name in names], source, "weight")
    return {own: torch.cat([named[name] for name in names]) for own, names in parts.items()}


def _qkv_heights(config: Eagle3Config) -> list[int]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [queries, keys, keys]


def vocabulary_maps(config: Eagle3Config, ids_D: Tensor) -> dict[str, Tensor]:
    """Return the draft vocabulary as other programs store it: `d2t`, the target's id minus the
    draft id, int64 [D], and `t2d`, True at target ids that the head can draft, bool [V].
    """
    ids_D = ids_D.cpu()
    return {"d2t": offsets_of(ids_D), "t2d": mask_of(ids_D, config.vocab_size)}


def take_vocabulary(
    weights: dict[str, Tensor], vocab_size: int, draft_vocab_size: int, source: str
) -> Tensor:
    """Remove `d2t` and `t2d` from `weights`, and return the target's id of each draft id: int64
    [D].

    The two may be missing if the draft vocabulary is the target's. Raises: ConfigError if only one
    is missing or they disagree, for example because `d2t` holds ids instead of offsets.
    """
    if draft_vocab_size == vocab_size and not {"d2t", "t2d"} & set(weights):
        return torch.arange(vocab_size)
    missing = [name for name in ("d2t", "t2d") if name not in weights]
    if missing:
        raise ConfigError(f"{source}: no weight {missing[0]}", param=missing[0])
    ids_D, mask_V = ids_of(weights.pop("d2t")), weights.pop("t2d").bool()
    in_range = (
        len(ids_D) == draft_vocab_size and int(ids_D.min()) >= 0 and int(ids_D.max()) < vocab_size
    )
    if not in_range or not torch.equal(mask_of(ids_D, vocab_size), mask_V):
        raise ConfigError(
            f"{source}: d2t, as offsets of draft ids, does not lead to the ids that t2d marks",
            param="d2t",
        )
    return ids_D


def check_embedding(weights: dict[str, Tensor], embedding_VH: Tensor | None, source: str) -> None:
    """Remove `embed_tokens.weight` from `weights`, and check that it equals the target's embedding,
    which the head shares.

    Raises: ConfigError if it differs, or if `embedding_VH` is None.
    """
    stored_VH = weights.pop("embed_tokens.weight", None)
    if stored_VH is None:
        return
    if embedding_VH is None:
        raise ConfigError(
            f"{source}: has embed_tokens.weight; give the target's embedding, with which it "
            "must agree",
            param="embed_tokens.weight",
        )
    if stored_VH.shape != embedding_VH.shape or not torch.equal(
        stored_VH.to(embedding_VH), embedding_VH
    ):
        raise ConfigError(
            f"{source}: embed_tokens.weight is not the target's embedding, which this head shares",
            param="embed_tokens.weight",
        )
