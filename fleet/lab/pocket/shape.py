"""Sizes, ids and voices that all parts of Pocket share.

Parts can be trained in parallel: both language stages read text through one embedding that is
initialized from a seed and never trained (`text_table`), and the codes are fixed before any
training. No MLP chooses among experts: at this size a mixture costs more than it gains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fleet.lab.pocket.corpus import SYMBOLS
from fleet.lab.pocket.teacher import Voice
from fleet.models.qwen3_omni import tiny_config
from fleet.models.qwen3_omni.tiny_config import Json

SEED: Final = 7
FRAME_S: Final = 0.08
SAMPLES_PER_FRAME: Final = 1920
NUM_CODE_GROUPS: Final = 8
"""Number of codes per frame: seven residual codebooks of the spectrum, then the number of glottal
cycles in the frame.
"""
CODEBOOK_SIZE: Final = 512
LEAD_FRAMES: Final = 4
"""Number of silent frames before the first word, so that text (one symbol per frame) stays ahead of
speech.
"""
VOICES: Final[Mapping[str, Voice]] = {
    "chelsie": Voice(name="en-us+f5", rate_wpm=140, pitch=50, pitch_range=40),
    "ethan": Voice(name="en-us", rate_wpm=140, pitch=85, pitch_range=40),
}
"""The teacher's voice for each of Pocket's speakers, with a pitch that whole cycles per frame
represent within a semitone.
"""

SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|says|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
"""Special symbols, whose ids follow the ids of `SYMBOLS`. A turn is `<|im_start|> role <|says|>
text <|im_end|>`, without separators.
"""
TOKEN_ID: Final[Mapping[str, int]] = {
    name: len(SYMBOLS) + index for index, name in enumerate(SPECIALS)
}
VOCAB_SIZE: Final = 80

HIDDEN: Final = 256
"""Hidden size of the Thinker, the Talker and the code predictor."""
HEAD_DIM: Final = 64
ROPE_THETA: Final = 10_000.0
CONTROL_IDS: Final = 1024
"""Number of ids at the end of the Talker's vocabulary that `generate` never samples, except the end
of speech. The ids below are codes.
"""


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Control ids in the Talker's vocabulary, such as the end of speech."""

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
    """Return the text embedding [VOCAB_SIZE, HIDDEN] of Thinker and Talker, float32, the same on
    every machine.
    """
    return (
        torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(SEED))
        .half()
        .float()
    )


def model_config() -> Json:
    """Return the content of config.json: the keys of the tiny checkpoint with Pocket's sizes.

    Only the Talker's layers must have experts, so they have one, whose weight is always 1. The
    multimodal rotary embedding equals the plain one without images. The vision tower is the
    smallest that the architecture allows: Pocket reads no images, and its weights are untrained.
    """
    roles = {role: TOKEN_ID[f"<|{role}|>"] for role in ("system", "user", "assistant")}
    config = tiny_config.model_config({**TOKEN_ID, **roles})
    thinker: Json = {
        "audio_config": _AUDIO_TOWER,
        "text_config": _thinker(),
        "vision_config": _VISION_TOWER,
    }
    return tiny_config.resized(
        config,
        {"code2wav_config": _CODE2WAV, "talker_config": _talker(), "thinker_config": thinker},
    )


def _decoder(*, num_layers: int, intermediate_size: int, vocab_size: int) -> Json:
    return {
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 4096,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": HIDDEN // HEAD_DIM,
        "rope_theta": ROPE_THETA,
        "vocab_size": vocab_size,
    }


def _experts(*, size: int) -> Json:
    return {
        "moe_intermediate_size": size,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "rope_scaling": {"mrope_section": [12, 10, 10]},
    }


def _thinker() -> Json:
    text = _decoder(num_layers=6, intermediate_size=768, vocab_size=VOCAB_SIZE) | _experts(size=64)
    return text | {"mlp_only_layers": list(range(6))}


def _talker() -> Json:
    text = _decoder(
        num_layers=5, intermediate_size=768, vocab_size=CODEBOOK_SIZE + CONTROL_IDS
    ) | _experts(size=640)
    predictor = _decoder(num_layers=2, intermediate_size=512, vocab_size=CODEBOOK_SIZE)
    return {
        "accept_hidden_layer": 3,
        "codec_bos_id": CODEC_IDS.bos,
        "codec_eos_token_id": CODEC_IDS.eos,
        "codec_nothink_id": CODEC_IDS.nothink,
        "codec_pad_id": CODEC_IDS.pad,
        "codec_think_bos_id": CODEC_IDS.think_bos,
        "codec_think_eos_id": CODEC_IDS.think_eos,
        "code_predictor_config": predictor | {"num_code_groups": NUM_CODE_GROUPS},
        "num_code_groups": NUM_CODE_GROUPS,
        "speaker_id": CODEC_IDS.speakers(),
        "text_config": text,
        "thinker_hidden_size": HIDDEN,
    }


_AUDIO_TOWER: Final[Json] = {
    "d_model": 256,
    "downsample_hidden_size": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "encoder_layers": 5,
    "num_hidden_layers": 5,
    "output_dim": HIDDEN,
}
_VISION_TOWER: Final[Json] = {
    "depth": 1,
    "hidden_size": 16,
    "image_size": 64,
    "intermediate_size": 16,
    "num_heads": 1,
    "num_position_embeddings": 16,
    "out_hidden_size": HIDDEN,
}
_CODE2WAV: Final[Json] = {
    "codebook_size": CODEBOOK_SIZE,
    "decoder_dim": 192,
    "hidden_size": 192,
    "intermediate_size": 384,
    "layer_scale_initial_scale": 0.1,
    "num_hidden_layers": 3,
    "num_quantizers": NUM_CODE_GROUPS,
    "sliding_window": 16,
}
