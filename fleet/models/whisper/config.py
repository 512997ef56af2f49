"""Sizes of a Whisper checkpoint, from its config.json. Knows no weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.core.errors import ConfigError
from fleet.processing.template import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSizes:
    """Sizes of the network. `audio_positions`: encoder positions of the longest window, 20 ms each;
    `text_positions`: decoder positions of one window, its forced prefix included.
    """

    width: int
    num_mels: int
    encoder_layers: int
    decoder_layers: int
    encoder_heads: int
    decoder_heads: int
    audio_positions: int
    text_positions: int


def read_sizes(folder: Path) -> WhisperSizes:
    """Read the sizes of a checkpoint. Raises: ConfigError unless it is a Whisper checkpoint."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind != "whisper":
        raise ConfigError(
            f"checkpoint {folder}: config.json has model_type {kind!r}; the recogniser needs a "
            "Whisper checkpoint (model_type whisper)",
            param="checkpoint",
        )
    for key, needed in (("activation_function", "gelu"), ("scale_embedding", False)):
        if config.get(key, needed) != needed:
            raise ConfigError(
                f"checkpoint {folder}: {key} is {config[key]!r}; only {needed!r} is computed",
                param="checkpoint",
            )
    return WhisperSizes(
        width=_size(folder, config, "d_model"),
        num_mels=_size(folder, config, "num_mel_bins"),
        encoder_layers=_size(folder, config, "encoder_layers"),
        decoder_layers=_size(folder, config, "decoder_layers"),
        encoder_heads=_size(folder, config, "encoder_attention_heads"),
        decoder_heads=_size(folder, config, "decoder_attention_heads"),
        audio_positions=_size(folder, config, "max_source_positions"),
        text_positions=_size(folder, config, "max_target_positions"),
    )


def _size(folder: Path, config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"checkpoint {folder}: config.json has {key} {value!r}, not a number of at least 1; "
            "fetch it again",
            param="checkpoint",
        )
    return value
