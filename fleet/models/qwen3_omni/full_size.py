"""Configuration of the published Qwen3-Omni-30B-A3B-Instruct, and names and shapes of the weights
that a config.json describes, without any weights.

Source: config.json of the published checkpoint, whose weights take 70.5 GB. The defaults of
transformers 5.23, configuration_qwen3_omni_moe.py, partly belong to another size (28 layers, 32
code groups).
"""

from importlib import import_module
from typing import Any, cast

import msgspec
import torch
from torch import nn
from transformers import Qwen3OmniMoeConfig
from transformers.initialization import no_init_weights

from fleet.models.qwen3_omni.code2wav_config import Code2WavConfig
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.tiny_config import Json, model_config, resized
from fleet.models.qwen3_omni.tiny_tokenizer import ADDED_TOKENS

NAME = "Qwen3-Omni-30B-A3B"
FIRST_ADDED_ID = 151643
ROLE_IDS = {"system": 8948, "user": 872, "assistant": 77091}

_ATTENTION: Json = {"head_dim": 128, "rope_theta": 1000000}
_EXPERTS: Json = {
    "num_experts": 128,
    "norm_topk_prob": True,
    "rope_scaling": {"mrope_section": [24, 20, 20]},
}
_THINKER: Json = (
    _ATTENTION
    | _EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 768,
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
)
_AUDIO_TOWER: Json = {
    "d_model": 1280,
    "downsample_hidden_size": 480,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "num_hidden_layers": 32,
    "output_dim": 2048,
}
_VISION_TOWER: Json = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
}
_TALKER: Json = (
    _ATTENTION
    | _EXPERTS
    | {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 384,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 20,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 768,
        "vocab_size": 3072,
    }
)
_CODE_PREDICTOR: Json = _ATTENTION | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layer_types": ["full_attention"] * 5,
    "num_attention_heads": 16,
    "num_code_groups": 16,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "vocab_size": 2048,
}
_CODEC_IDS: Json = {
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_pad_id": 2148,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "speaker_id": {"chelsie": 2301, "ethan": 2302},
}
_CODE2WAV: Json = {
    "codebook_size": 2048,
    "decoder_dim": 1536,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 16,
    "num_quantizers": 16,
    "sliding_window": 72,
}


def published_config() -> Json:
    """Return the content of the published checkpoint's config.json."""
    added = {name: FIRST_ADDED_ID + number for number, name in enumerate(ADDED_TOKENS)}
    talker = _CODEC_IDS | {
        "accept_hidden_layer": 24,
        "code_predictor_config": _CODE_PREDICTOR,
        "num_code_groups": 16,
        "text_config": _TALKER,
        "thinker_hidden_size": 2048,
    }
    sizes: Json = {
        "code2wav_config": _CODE2WAV,
        "talker_config": talker,
        "thinker_config": {
            "audio_config": _AUDIO_TOWER,
            "text_config": _THINKER,
            "vision_config": _VISION_TOWER,
        },
    }
    return resized(model_config(added | ROLE_IDS), sizes)


def parsed(config: Json) -> tuple[OmniConfig, Code2WavConfig]:
    """Return the content of a config.json as the typed configuration that stages use."""
    omni = cast(OmniConfig, Qwen3OmniMoeConfig.from_dict(config))
    return omni, msgspec.convert(config["code2wav_config"], Code2WavConfig)


def weight_shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight that the content of a config.json describes, by name. All
    experts of a layer count as one weight.
    """
    library: Any = import_module("transformers")  # its types are incomplete
    with torch.device("meta"), no_init_weights():
        model = cast(
            nn.Module,
            library.Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig.from_dict(config)),
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
