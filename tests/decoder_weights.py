"""Decoder models with random weights in memory, for tests that need a model's structure but not its
answers.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fleet.models.qwen3_omni.code2wav import PREFIX, Code2Wav
from fleet.models.qwen3_omni.code2wav_operations import DecoderOperations
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.full_size import parsed, weight_shapes
from fleet.models.qwen3_omni.tiny_config import model_config, resized
from fleet.models.qwen3_omni.tiny_weights import fill_full_size
from fleet.models.random_weights import RandomWeightReader

TRUE_COUNTS = {
    "talker_config": {
        "text_config": {
            "num_hidden_layers": 20,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 4,
        },
        "code_predictor_config": {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
    },
    "thinker_config": {
        "text_config": {
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 4,
        }
    },
}
"""Configuration of a tiny model with the numbers of layers and experts of Qwen3-Omni-30B-A3B, the
tiny checkpoint's widths, and narrower experts.
"""


def random_model(sizes: Mapping[str, Any]) -> tuple[RandomWeightReader, OmniConfig]:
    """Return weights and configuration of a tiny model with some sizes changed."""
    ids: defaultdict[str, int] = defaultdict(count(3).__next__)
    config = resized(model_config(ids), sizes)
    generator = torch.Generator().manual_seed(0)

    def fill(name: str, weight: Tensor) -> None:
        weight.normal_(0.0, 1 / math.sqrt(weight.shape[-1]), generator=generator)

    reader = RandomWeightReader(
        weight_shapes(config), fill, device=torch.device("cpu"), dtype=torch.float32
    )
    return reader, parsed(config)[0]


TRUE_CODEC_COUNTS = {"code2wav_config": {"num_hidden_layers": 8, "decoder_dim": 32}}
"""Configuration of a tiny codec decoder with the published numbers of layers, rates and dilations,
and narrow widths.
"""


def random_codec(operations: DecoderOperations | None = None) -> Code2Wav:
    """Return a codec decoder of `TRUE_CODEC_COUNTS` with random weights, the same in each call."""
    ids: defaultdict[str, int] = defaultdict(count(3).__next__)
    config = resized(model_config(ids), TRUE_CODEC_COUNTS)
    reader = RandomWeightReader(
        weight_shapes(config), fill_full_size, device=torch.device("cpu"), dtype=torch.float32
    )
    return Code2Wav(parsed(config)[1], lambda name: reader.get(PREFIX + name), operations)
