"""Programs with random weights in memory, for tests that need a model's structure and not its answers."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fleet.models.checkpoint import INDEX, WeightReader
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.tiny_config import model_config, resized

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
"""Numbers of layers and experts of Qwen3-Omni-30B-A3B; the tiny checkpoint's widths, and narrower experts."""


class RandomReader(WeightReader):
    """Gaussian weights of the given shapes, from a folder that holds an index only."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(shapes, "none.safetensors")}))
        super().__init__(folder, device=torch.device("cpu"), dtype=torch.float32)
        self._shapes = shapes
        self._generator = torch.Generator().manual_seed(0)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read_into(self, out: Tensor, name: str) -> None:
        out.normal_(0.0, 1 / math.sqrt(out.shape[-1]), generator=self._generator)


def random_model(folder: Path, sizes: Mapping[str, Any]) -> tuple[RandomReader, OmniConfig]:
    """Return weights and configuration of a tiny model with some sizes changed."""
    transformers: Any = import_module("transformers")
    ids: defaultdict[str, int] = defaultdict(count(3).__next__)
    config = transformers.Qwen3OmniMoeConfig.from_dict(resized(model_config(ids), sizes))
    with torch.device("meta"):
        model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    return RandomReader(folder, shapes), cast(OmniConfig, config)
