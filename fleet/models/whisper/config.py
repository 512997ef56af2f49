"""Sizes of a Whisper checkpoint, from its config.json. Knows no weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fleet.core.errors import ConfigError
from fleet.processing.template import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSizes:
    """Sizes of the network. `audio_positions`: encoder positions of the longest window, 20 ms each.
    `text_positions`: decoder positions of one window, its forced prefix included. `filter_width`:
    number of audio positions over which attention is smoothed before tokens are aligned with it.
    `alignment_heads`: layer and number of each decoder head whose attention follows the audio.
    """

    width: int
    num_mels: int
    encoder_layers: int
    decoder_layers: int
    encoder_heads: int
    decoder_heads: int
    audio_positions: int
    text_positions: int
    filter_width: int
    alignment_heads: tuple[tuple[int, int], ...]


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
    layers = _size(folder, config, "decoder_layers")
    heads = _size(folder, config, "decoder_attention_heads")
    return WhisperSizes(
        width=_size(folder, config, "d_model"),
        num_mels=_size(folder, config, "num_mel_bins"),
        encoder_layers=_size(folder, config, "encoder_layers"),
        decoder_layers=layers,
        encoder_heads=_size(folder, config, "encoder_attention_heads"),
        decoder_heads=heads,
        audio_positions=_size(folder, config, "max_source_positions"),
        text_positions=_size(folder, config, "max_target_positions"),
        filter_width=_size(folder, {"median_filter_width": 7} | config, "median_filter_width"),
        alignment_heads=_alignment_heads(folder, layers, heads),
    )


def _alignment_heads(folder: Path, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Return the heads that generation_config.json names; without a list, all heads of the upper
    half of the layers, as OpenAI's code does. Raises: ConfigError for a head that does not exist.
    """
    listed = read_json(folder / "generation_config.json").get("alignment_heads")
    if not listed:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    pairs = tuple((int(layer), int(head)) for layer, head in cast("list[list[int]]", listed))
    if any(not (0 <= layer < layers and 0 <= head < heads) for layer, head in pairs):
        raise ConfigError(
            f"checkpoint {folder}: generation_config.json has alignment_heads {listed}, but the "
            f"decoder has {layers} layers of {heads} heads; the files are of different models",
            param="checkpoint",
        )
    return pairs


def _size(folder: Path, config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"checkpoint {folder}: config.json has {key} {value!r}, not a number of at least 1; "
            "fetch it again",
            param="checkpoint",
        )
    return value
