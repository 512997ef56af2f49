"""Sizes, ids and voices that all parts of Pocket share.

Parts can be trained in parallel: both language stages read text through one embedding that is initialized from a seed and never
trained (`text_table`), and the codes are fixed before any training. No MLP chooses among experts: at this size a mixture costs
more than it gains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fleet.pocket.corpus import SYMBOLS
from fleet.pocket.teacher import Voice

Json = dict[str, Any]

SEED: Final = 7
FRAME_S: Final = 0.08
SAMPLES_PER_FRAME: Final = 1920
NUM_CODE_GROUPS: Final = 8
"""Seven residual codebooks of the spectrum, then the number of glottal cycles in the frame."""
CODEBOOK_SIZE: Final = 512
LEAD_FRAMES: Final = 4
"""Silent frames before the first word, so that text (one symbol per frame) stays ahead of speech."""
VOICES: Final[Mapping[str, Voice]] = {
    "chelsie": Voice(name="en-us+f5", rate_wpm=140, pitch=50, pitch_range=40),
    "ethan": Voice(name="en-us", rate_wpm=140, pitch=85, pitch_range=40),
}
"""Speakers and the teacher's voice of each, with a pitch that whole cycles per frame represent within a semitone."""

SPECIALS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|says|>",
    "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
    "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
)  # fmt: skip
"""Special symbols, with the ids after `SYMBOLS`. A turn is `<|im_start|> role <|says|> text <|im_end|>`, without separators."""
TOKEN_ID: Final[Mapping[str, int]] = {name: len(SYMBOLS) + index for index, name in enumerate(SPECIALS)}
VOCAB_SIZE: Final = 80

HIDDEN: Final = 256
"""Hidden size of the Thinker, the Talker and the code predictor."""
HEAD_DIM: Final = 64
ROPE_THETA: Final = 10_000.0
CONTROL_IDS: Final = 1024
"""Number of the Talker's last ids, which `generate` never draws, except its end: the codes are before them."""


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Control ids in the Talker's vocabulary."""

    pad: int = CODEBOOK_SIZE
    bos: int = CODEBOOK_SIZE + 1
    eos: int = CODEBOOK_SIZE + 2
    nothink: int = CODEBOOK_SIZE + 3
    think_bos: int = CODEBOOK_SIZE + 4
    think_eos: int = CODEBOOK_SIZE + 5
    first_speaker: int = CODEBOOK_SIZE + 6

    def speakers(self) -> dict[str, int]:
        return {name: self.first_speaker + index for index, name in enumerate(sorted(VOICES))}


CODEC_IDS: Final = CodecIds()


def text_table() -> Tensor:
    """Return the Thinker's embedding, which the Talker shares: [VOCAB_SIZE, HIDDEN] of float32, the same on every machine."""
    return torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(SEED)).half().float()


def model_config() -> Json:
    """Return the content of config.json. Source of the keys: configuration_qwen3_omni_moe.py of transformers 5.23."""
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "assistant_token_id": TOKEN_ID["<|assistant|>"],
        "code2wav_config": _code2wav(),
        "dtype": "float32",
        "enable_audio_output": True,
        "im_end_token_id": TOKEN_ID["<|im_end|>"],
        "im_start_token_id": TOKEN_ID["<|im_start|>"],
        "model_type": "qwen3_omni_moe",
        "system_token_id": TOKEN_ID["<|system|>"],
        "talker_config": _talker(),
        "thinker_config": _thinker(),
        "tts_bos_token_id": TOKEN_ID["<tts_text_bos>"],
        "tts_eos_token_id": TOKEN_ID["<tts_text_eod>"],
        "tts_pad_token_id": TOKEN_ID["<tts_pad>"],
        "user_token_id": TOKEN_ID["<|user|>"],
    }


def _decoder(*, num_layers: int, intermediate_size: int) -> Json:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 4096,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": HIDDEN // HEAD_DIM,
        "rms_norm_eps": 1e-06,
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _mlps(*, dense_layers: int, expert_size: int, shared_size: int) -> Json:
    """Return the keys of the MLPs and of the rotary embedding.

    The Thinker's layers may be dense; the Talker's must have experts, so they have one, whose weight is always 1. The rotary
    embedding is the multimodal one, which equals the plain one without images.
    """
    scaling = {"interleaved": True, "mrope_interleaved": True, "mrope_section": [12, 10, 10]}
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(dense_layers)),
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": True,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "output_router_logits": False,
        "rope_scaling": scaling | {"rope_type": "default", "type": "default"},
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": shared_size,
    }


def _media_ids() -> Json:
    return {
        "audio_end_token_id": TOKEN_ID["<|audio_end|>"],
        "audio_start_token_id": TOKEN_ID["<|audio_start|>"],
        "audio_token_id": TOKEN_ID["<|audio_pad|>"],
        "image_token_id": TOKEN_ID["<|image_pad|>"],
        "initializer_range": 0.02,
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    }


def _thinker() -> Json:
    text = _decoder(num_layers=6, intermediate_size=768) | _mlps(dense_layers=6, expert_size=64, shared_size=0)
    text |= {"model_type": "qwen3_omni_moe_text", "use_qk_norm": True, "vocab_size": VOCAB_SIZE}
    return _media_ids() | {
        "audio_config": _audio_tower(),
        "dtype": "float32",
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": text,
        "user_token_id": TOKEN_ID["<|user|>"],
        "vision_config": _vision_tower(),
        "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
    }


def _audio_tower() -> Json:
    return {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "conv_chunksize": 500,
        "d_model": 256,
        "downsample_hidden_size": 32,
        "dropout": 0.0,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 1024,
        "encoder_layers": 5,
        "initializer_range": 0.02,
        "max_source_positions": 1500,
        "model_type": "qwen3_omni_moe_audio_encoder",
        "n_window": 50,
        "n_window_infer": 800,
        "num_hidden_layers": 5,
        "num_mel_bins": 128,
        "output_dim": HIDDEN,
        "scale_embedding": False,
    }


def _vision_tower() -> Json:
    """Return the smallest vision tower that the architecture allows: Pocket reads no images, and these weights are untrained."""
    return {
        "apply_vit_abs_pos_embed": True,
        "deepstack_visual_indexes": [0],
        "depth": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 16,
        "image_size": 64,
        "in_channels": 3,
        "in_chans": 3,
        "initializer_range": 0.02,
        "intermediate_size": 16,
        "model_type": "qwen3_omni_moe_vision_encoder",
        "num_heads": 1,
        "num_position_embeddings": 16,
        "out_hidden_size": HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
    }


def _talker() -> Json:
    text = _decoder(num_layers=5, intermediate_size=768) | _mlps(dense_layers=0, expert_size=640, shared_size=128)
    text |= {"model_type": "qwen3_omni_moe_talker_text", "vocab_size": CODEBOOK_SIZE + CONTROL_IDS}
    predictor = _decoder(num_layers=2, intermediate_size=512) | {
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 28,
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "num_code_groups": NUM_CODE_GROUPS,
        "vocab_size": CODEBOOK_SIZE,
    }
    return _media_ids() | {
        "accept_hidden_layer": 3,
        "codec_bos_id": CODEC_IDS.bos,
        "codec_eos_token_id": CODEC_IDS.eos,
        "codec_nothink_id": CODEC_IDS.nothink,
        "codec_pad_id": CODEC_IDS.pad,
        "codec_think_bos_id": CODEC_IDS.think_bos,
        "codec_think_eos_id": CODEC_IDS.think_eos,
        "code_predictor_config": predictor,
        "num_code_groups": NUM_CODE_GROUPS,
        "output_router_logits": False,
        "spatial_merge_size": 2,
        "speaker_id": CODEC_IDS.speakers(),
        "text_config": text,
        "thinker_hidden_size": HIDDEN,
    }


def _code2wav() -> Json:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_size": CODEBOOK_SIZE,
        "decoder_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "layer_scale_initial_scale": 0.1,
        "max_position_embeddings": 8000,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_quantizers": NUM_CODE_GROUPS,
        "rms_norm_eps": 1e-05,
        "rope_theta": ROPE_THETA,
        "sliding_window": 16,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
