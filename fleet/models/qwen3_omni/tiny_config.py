"""config.json and generation_config.json of the tiny checkpoint: the real one's keys with small
numbers.

The dictionaries carry the keys of the real checkpoint that `transformers` or vLLM reads; vLLM needs
`vision_config.image_size`, `text_config.tie_word_embeddings`, `rope_scaling` and `rope_theta`,
which `transformers` does without. A checkpoint of another size has the same keys (`resized`). Knows
no weights.
"""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
TokenIds = Mapping[str, int]
"""Ids of a tokenizer's tokens, role names included, by text."""

VOCAB_SIZE = 576
"""Rows of the Thinker's embedding: 545 tokens, padded as the real checkpoint pads."""
HIDDEN = 128
"""Hidden size of the Thinker, the Talker and the code predictor."""
NUM_CODE_GROUPS = 16
CODEBOOK_SIZE = 128
TALKER_VOCAB_SIZE = CODEBOOK_SIZE + 1024
"""Size of the Talker's vocabulary. generate() never samples the top 1024 ids except codec_eos, so
every sample is a code or codec_eos.
"""
MROPE_SECTION = (6, 5, 5)
"""Rotary frequencies for time, height and width: half of a head of 32."""


def model_config(ids: TokenIds) -> Json:
    """Return the content of the tiny checkpoint's config.json."""
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "assistant_token_id": ids["assistant"],
        "code2wav_config": _code2wav_config(),
        "dtype": "float32",
        "enable_audio_output": True,
        "im_end_token_id": ids["<|im_end|>"],
        "im_start_token_id": ids["<|im_start|>"],
        "model_type": "qwen3_omni_moe",
        "system_token_id": ids["system"],
        "talker_config": _talker_config(ids),
        "thinker_config": _thinker_config(ids),
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "user_token_id": ids["user"],
    }


def resized(config: Json, sizes: Mapping[str, Any]) -> Json:
    """Return a copy of the config with the values in `sizes`, which is nested like the config and
    may only have its keys.
    """
    assert sizes.keys() <= config.keys(), f"unknown keys {sizes.keys() - config.keys()}"
    return config | {
        key: resized(config[key], value) if isinstance(value, dict) else value
        for key, value in sizes.items()
    }


def generation_config(ids: TokenIds) -> Json:
    """Return the content of generation_config.json: the real model's sampling parameters, the
    Talker's under a prefix. Speech is limited by length, since random weights never end it by
    themselves.
    """
    return {
        "do_sample": True,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "talker_max_new_tokens": 300,
        "talker_repetition_penalty": 1.05,
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }


def _decoder(*, num_layers: int, intermediate_size: int) -> Json:
    """Return the settings that the text decoders of Thinker, Talker and code predictor share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _experts(*, shared_intermediate_size: int) -> Json:
    """Return the settings of experts and of the multimodal rotary embedding, which Thinker and
    Talker have.

    Two keys say that the embedding is interleaved: the real config has `interleaved`, and vLLM
    reads `mrope_interleaved`.
    """
    scaling: Json = {
        "interleaved": True,
        "mrope_interleaved": True,
        "mrope_section": list(MROPE_SECTION),
    }
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "rope_scaling": scaling | {"rope_type": "default", "type": "default"},
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": shared_intermediate_size,
    }


def _thinker_config(ids: TokenIds) -> Json:
    text = _decoder(num_layers=4, intermediate_size=128) | _experts(shared_intermediate_size=0)
    text |= {"model_type": "qwen3_omni_moe_text", "use_qk_norm": True, "vocab_size": VOCAB_SIZE}
    return _media_ids(ids) | {
        "audio_config": _audio_config(),
        "dtype": "float32",
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": text,
        "user_token_id": ids["user"],
        "vision_config": _vision_config(),
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _media_ids(ids: TokenIds) -> Json:
    """Return the media token ids and other settings that Thinker and Talker share."""
    return {
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "initializer_range": 0.02,
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def _audio_config() -> Json:
    return {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "conv_chunksize": 500,
        "d_model": 64,
        "downsample_hidden_size": 16,
        "dropout": 0.0,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "encoder_layers": 2,
        "initializer_range": 0.02,
        "max_source_positions": 1500,
        "model_type": "qwen3_omni_moe_audio_encoder",
        "n_window": 50,
        "n_window_infer": 800,
        "num_hidden_layers": 2,
        "num_mel_bins": 128,
        "output_dim": HIDDEN,
        "scale_embedding": False,
    }


def _vision_config() -> Json:
    return {
        "apply_vit_abs_pos_embed": True,
        "deepstack_visual_indexes": [0],
        "depth": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "image_size": 256,
        "in_channels": 3,
        "in_chans": 3,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "model_type": "qwen3_omni_moe_vision_encoder",
        "num_heads": 2,
        "num_position_embeddings": 256,
        "out_hidden_size": HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
    }


def _talker_config(ids: TokenIds) -> Json:
    text = _decoder(num_layers=3, intermediate_size=256) | _experts(shared_intermediate_size=128)
    text |= {"model_type": "qwen3_omni_moe_talker_text", "vocab_size": TALKER_VOCAB_SIZE}
    predictor = _decoder(num_layers=2, intermediate_size=256) | {
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 28,
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "num_code_groups": NUM_CODE_GROUPS,
        "vocab_size": CODEBOOK_SIZE,
    }
    return (
        _media_ids(ids)
        | _codec_ids()
        | {
            "accept_hidden_layer": 2,
            "code_predictor_config": predictor,
            "num_code_groups": NUM_CODE_GROUPS,
            "output_router_logits": False,
            "spatial_merge_size": 2,
            "text_config": text,
            "thinker_hidden_size": HIDDEN,
        }
    )


def _codec_ids() -> Json:
    """Return the special ids of the Talker's vocabulary, which are as far above the codes as in the
    real checkpoint.
    """
    return {
        "codec_bos_id": CODEBOOK_SIZE + 101,
        "codec_eos_token_id": CODEBOOK_SIZE + 102,
        "codec_nothink_id": CODEBOOK_SIZE + 107,
        "codec_pad_id": CODEBOOK_SIZE + 100,
        "codec_think_bos_id": CODEBOOK_SIZE + 108,
        "codec_think_eos_id": CODEBOOK_SIZE + 109,
        "speaker_id": {"chelsie": CODEBOOK_SIZE + 253, "ethan": CODEBOOK_SIZE + 254},
    }


def _code2wav_config() -> Json:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_size": CODEBOOK_SIZE,
        "decoder_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 192,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_quantizers": NUM_CODE_GROUPS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
