"""The codec decoder's section of config.json, and the sizes that follow from it. Knows no weights.

Source: `transformers` 5.23 `Qwen3OmniMoeCode2WavConfig`, its defaults included.
"""

import math
from pathlib import Path

import msgspec

from fleet.core.errors import ConfigError


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding settings as `transformers` 5 writes them; older checkpoints have
    `rope_theta` at the top level of the section.
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"


class Code2WavConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the codec decoder.

    `sliding_window`: number of positions that a query sees, its own included. Two kinds of
    transposed convolution raise the sample rate: `upsampling_ratios` (kernel = stride) and
    `upsample_rates` (kernel = 2 strides, trimmed by one stride at each side).
    """

    codebook_size: int = 2048
    hidden_size: int = 1024
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int | None = None
    attention_bias: bool = False
    sliding_window: int = 72
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_parameters: RopeParameters | None = None
    num_hidden_layers: int = 8
    num_quantizers: int = 16
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope_base(self) -> float:
        return self.rope_parameters.rope_theta if self.rope_parameters else self.rope_theta

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @property
    def lookahead_samples(self) -> int:
        """Number of samples at the end of a frame that depend on the next frame: 555 for
        `upsample_rates` (8, 5, 4, 3).
        """
        lookahead = 0
        for rate in self.upsample_rates:
            lookahead = (lookahead + 1) * rate
        return lookahead


class _Checkpoint(msgspec.Struct):
    code2wav_config: Code2WavConfig


def read_config(folder: Path) -> Code2WavConfig:
    """Read the codec decoder's section of a checkpoint's config.json. Raises: ConfigError if the
    section is missing, or its architecture is not implemented.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"checkpoint: {folder} has no config.json; give a checkpoint folder", param="checkpoint"
        )
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_Checkpoint).code2wav_config
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"checkpoint: {file} cannot be read: {error}", param="checkpoint"
        ) from error
    if config.hidden_act != "silu":
        raise ConfigError(
            f"checkpoint: hidden_act {config.hidden_act!r} is not implemented; use 'silu'",
            param="checkpoint",
        )
    if config.rope_parameters and config.rope_parameters.rope_type != "default":
        kind = config.rope_parameters.rope_type
        raise ConfigError(
            f"checkpoint: rope_type {kind!r} is not implemented; use 'default'", param="checkpoint"
        )
    if config.samples_per_frame <= config.lookahead_samples:
        raise ConfigError(
            "checkpoint: a single frame yields no samples with these upsampling rates",
            param="checkpoint",
        )
    return config
