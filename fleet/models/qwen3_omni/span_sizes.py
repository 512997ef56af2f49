"""Sizes of the layers and other parts of Qwen3-Omni's Thinker and Talker, from config.json or the
headers of weight files: no weight is read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Never

import torch
from torch import Tensor

from fleet.engine.torch.fp8 import E4M3
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.config import DividedStage, OmniConfig, TextConfig, read_config
from fleet.models.qwen3_omni.full_size import weight_shapes
from fleet.models.qwen3_omni.load import AUDIO_TOWER, EXPERTS, THINKER_EMBEDDING
from fleet.models.qwen3_omni.span import THINKER_HEAD, StageDecoder
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.plan import ModelSizes

TALKER_PARTS = (
    "talker.model.codec_embedding.",
    "talker.text_projection.",
    "talker.hidden_projection.",
    "talker.code_predictor.",
)
"""Name prefixes of the Talker's weights outside its decoder, without the Thinker's embedding."""


class DescribedWeights(WeightReader):
    """Reader that knows only the names and shapes of weights, as a config.json describes them;
    reading a weight fails. `folder`: checkpoint named in errors.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(
            f"checkpoint {folder}", shapes, device=torch.device("meta"), dtype=torch.float32
        )
        self._shapes = shapes

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise self._missing(name)
        return self._shapes[name]

    def _write(self, out: Tensor, name: str, part: int | None = None) -> Never:
        raise AssertionError(f"{name} is described only")


def stage_sizes(
    stage: DividedStage,
    folder: Path,
    dtype: torch.dtype,
    *,
    num_positions: int,
    buffer_bytes: int,
    fp8_experts: bool = False,
) -> ModelSizes:
    """Return the sizes in bytes of a stage's decoder from config.json alone; parameters as in
    `decoder_sizes`. Raises: ConfigError.
    """
    config = read_config(folder)
    shapes = weight_shapes(json.loads((folder / "config.json").read_text()))
    if config.thinker_config.text_config.tie_word_embeddings:
        del shapes[THINKER_HEAD]  # checkpoints do not store it
    described = DescribedWeights(folder, shapes)
    return decoder_sizes(
        described,
        config,
        stage,
        dtype,
        num_positions=num_positions,
        buffer_bytes=buffer_bytes,
        fp8_experts=fp8_experts,
    )


def decoder_sizes(
    reader: WeightReader,
    config: OmniConfig,
    stage: DividedStage,
    dtype: torch.dtype,
    *,
    num_positions: int,
    buffer_bytes: int,
    head_on_anchor: bool = False,
    fp8_experts: bool = False,
) -> ModelSizes:
    """Return the sizes in bytes of a stage's decoder layers, and of the parts that only its anchor
    has.

    `num_positions`: KV positions that each process has to hold. `buffer_bytes`: memory of each
    process beside weights and KV. `head_on_anchor`: the anchor has the final norm and the output
    head whatever its span, as a Talker's anchor always does. `fp8_experts`: the matrices of experts
    are held in 8 bits, with a float32 scale per output channel. Raises: ConfigError as
    `StageDecoder.of`, and for unreadable files.
    """
    stored = StageDecoder.of(stage, reader, config)

    def bytes_of(names: Sequence[str]) -> int:
        return sum(
            _fp8_bytes(reader.shape(name))
            if fp8_experts and EXPERTS in name
            else math.prod(reader.shape(name)) * dtype.itemsize
            for name in names
        )

    numbers = range(stored.config.num_hidden_layers)
    layers = [bytes_of(stored.weights_of(reader, LayerSpan(number, number))) for number in numbers]
    after, head = bytes_of([stored.norm]), bytes_of([stored.head])
    prefixes = TALKER_PARTS if stage == "talker" else (reader.first_prefix(AUDIO_TOWER),)
    anchor = sum(bytes_of(reader.under(prefix)) for prefix in prefixes)
    stays = head_on_anchor or stage == "talker"
    position_bytes = stored.config.head_dim * dtype.itemsize
    return ModelSizes(
        layers=tuple(size + _repeated_norm_rows(stored.config) * position_bytes for size in layers),
        embedding=bytes_of([reader.first_prefix(THINKER_EMBEDDING)]),
        before=0,
        after=0 if stays else after,
        head=0 if stays else head,
        tied=stored.tied and not stays,
        kv_bytes=2 * stored.config.num_key_value_heads * num_positions * position_bytes,
        # the table of rotary embeddings
        buffer_bytes=buffer_bytes + 2 * num_positions * position_bytes,
        anchor=anchor + (after + head * (not stored.tied)) * stays,
    )


def _fp8_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of a matrix of an expert, or of the stacked matrices of all, in 8 bits."""
    return math.prod(shape) * E4M3.itemsize + math.prod(shape[:-1]) * torch.float32.itemsize


def _repeated_norm_rows(config: TextConfig) -> int:
    """Return how many more vectors of head size a loaded layer has than the checkpoint's, which
    stores the norms of queries and keys once instead of once per head.
    """
    return config.num_attention_heads + config.num_key_value_heads - 2
