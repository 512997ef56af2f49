"""Typed access to the parts of a Qwen3-Omni config in use; `transformers` adds defaults missing in
an old config.json.
"""

import json
from pathlib import Path
from typing import Literal, Protocol, cast

from transformers import Qwen3OmniMoeConfig

from fleet.core.errors import ConfigError

DividedStage = Literal["thinker", "talker"]
"""A stage with a decoder, whose layers can be divided."""


class TextConfig(Protocol):
    """Configuration of a text decoder. With experts it also has `num_experts`,
    `num_experts_per_tok` and `norm_topk_prob`.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    vocab_size: int


class AudioConfig(Protocol):
    """Configuration of the audio encoder, which encodes chunks of two windows, 2 x `n_window`
    frames, together.
    """

    n_window: int


class ThinkerConfig(Protocol):
    text_config: TextConfig
    audio_config: AudioConfig
    audio_token_id: int
    image_token_id: int
    video_token_id: int


class TalkerConfig(Protocol):
    text_config: TextConfig
    code_predictor_config: TextConfig
    accept_hidden_layer: int
    num_code_groups: int
    speaker_id: dict[str, int]
    codec_bos_id: int
    codec_eos_token_id: int
    codec_nothink_id: int
    codec_pad_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int


class OmniConfig(Protocol):
    thinker_config: ThinkerConfig
    talker_config: TalkerConfig
    assistant_token_id: int
    im_end_token_id: int
    im_start_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    tts_pad_token_id: int
    user_token_id: int


def decoder_config(config: OmniConfig, stage: DividedStage) -> TextConfig:
    return (
        config.talker_config.text_config if stage == "talker" else config.thinker_config.text_config
    )


def read_config(folder: Path) -> OmniConfig:
    """Read a checkpoint's configuration. Raises: ConfigError unless the checkpoint is a Qwen3-Omni
    with a Talker and supported activations.
    """
    path = folder / "config.json"
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint {folder}: no readable config.json ({error})", param="checkpoint"
        ) from error
    if kind != "qwen3_omni_moe":
        raise ConfigError(
            f"checkpoint {folder}: a {kind} model; this graph needs qwen3_omni_moe",
            param="checkpoint",
        )
    loaded = Qwen3OmniMoeConfig.from_pretrained(folder)
    if not loaded.enable_audio_output:
        raise ConfigError(
            f"checkpoint {folder}: has no audio output, so it cannot speak", param="checkpoint"
        )
    config = cast(OmniConfig, loaded)
    talker = config.talker_config
    for decoder in (
        config.thinker_config.text_config,
        talker.text_config,
        talker.code_predictor_config,
    ):
        if decoder.hidden_act != "silu":
            raise ConfigError(
                f"checkpoint {folder}: activation {decoder.hidden_act} is not supported; use "
                "one with silu",
                param="checkpoint",
            )
    return config
