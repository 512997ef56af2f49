"""Sizes of the divisible stages' models, read from a checkpoint's configuration without its
weights.

One table entry per stage. Knows no memory budget and no deployment.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.graphs.cascade import CASCADE
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.graphs.text import LM, TEXT
from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.span_load import model_sizes
from fleet.models.qwen3_omni.config import decoder_config
from fleet.models.qwen3_omni.config import read_config as read_omni_config
from fleet.models.qwen3_omni.span_sizes import stage_sizes
from fleet.spans.protocol.buffers import PassLimits, buffer_bytes
from fleet.spans.protocol.plan import ModelSizes


class ReadsSizes(Protocol):
    """Function that reads the sizes of one model from a checkpoint folder; parameters as in
    `span_sizes`. Raises: ConfigError.
    """

    def __call__(
        self, folder: Path, dtype: torch.dtype, *, num_positions: int, buffer_bytes: int
    ) -> ModelSizes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedStage:
    """Functions that read the sizes of one stage's model from a checkpoint folder. `sizes`: bytes
    of layers and other parts; `row_width`: hidden size between layers; `fp8_sizes`: bytes with
    experts in 8 bits, None if the model has no experts.
    """

    sizes: ReadsSizes
    row_width: Callable[[Path], int]
    fp8_sizes: ReadsSizes | None = None


def _hidden_size(folder: Path) -> int:
    return int(read_config(folder).hidden_size)


def _thinker_width(folder: Path) -> int:
    return decoder_config(read_omni_config(folder), "thinker").hidden_size


def _talker_width(folder: Path) -> int:
    return decoder_config(read_omni_config(folder), "talker").hidden_size


_STAGES: dict[tuple[str, StageName], SizedStage] = {
    (TEXT.name, LM): SizedStage(sizes=model_sizes, row_width=_hidden_size),
    (CASCADE.name, CASCADE.main_stage.name): SizedStage(sizes=model_sizes, row_width=_hidden_size),
    (QWEN3_OMNI.name, THINKER): SizedStage(
        sizes=partial(stage_sizes, "thinker"),
        row_width=_thinker_width,
        fp8_sizes=partial(stage_sizes, "thinker", fp8_experts=True),
    ),
    (QWEN3_OMNI.name, TALKER): SizedStage(
        sizes=partial(stage_sizes, "talker"),
        row_width=_talker_width,
        fp8_sizes=partial(stage_sizes, "talker", fp8_experts=True),
    ),
}


def span_sizes(
    graph: str,
    stage: StageName,
    checkpoint: Path,
    dtype: torch.dtype,
    *,
    num_positions: int,
    buffer_bytes: int,
    fp8_experts: bool = False,
) -> ModelSizes:
    """Return the sizes in bytes of a stage's layers and other parts. No weight is read.

    `num_positions`: KV positions that each process has to hold. `buffer_bytes`: memory of each
    process beside weights and KV. `fp8_experts`: the matrices of experts are held in 8 bits, all
    else in `dtype`. Raises: ConfigError if the stage is not divisible, naming the stages that are,
    or if the checkpoint cannot be read.
    """
    sized = _sized(graph, stage)
    read = sized.fp8_sizes if fp8_experts else sized.sizes
    assert read is not None, f"the model of {stage} has no experts"
    return read(checkpoint, dtype, num_positions=num_positions, buffer_bytes=buffer_bytes)


def span_row_width(graph: str, stage: StageName, checkpoint: Path) -> int:
    """Return the hidden size between the layers of a stage's model. Raises: ConfigError as
    `span_sizes`.
    """
    return _sized(graph, stage).row_width(checkpoint)


def process_sizes(
    graph: str,
    stage: StageName,
    checkpoint: Path,
    dtype: torch.dtype,
    *,
    limits: PassLimits,
    page_size: int,
    device_kind: str,
    fp8_experts: bool = False,
) -> ModelSizes:
    """Return the sizes of a stage's model as `span_sizes`, with the KV cache for
    `limits.num_positions` and the compute buffers of each process included.

    Raises: ConfigError as `span_sizes`.
    """
    # A pool has one page more than it lends, for padding.
    positions = limits.num_positions + page_size
    sizes = span_sizes(
        graph,
        stage,
        checkpoint,
        dtype,
        num_positions=positions,
        buffer_bytes=0,
        fp8_experts=fp8_experts,
    )
    buffers = pass_buffer_bytes(
        graph, stage, checkpoint, dtype, sizes, limits=limits, device_kind=device_kind
    )
    return replace(sizes, buffer_bytes=sizes.buffer_bytes + buffers)


def pass_buffer_bytes(
    graph: str,
    stage: StageName,
    checkpoint: Path,
    dtype: torch.dtype,
    sizes: ModelSizes,
    *,
    limits: PassLimits,
    device_kind: str,
) -> int:
    """Return the bytes of memory that a process needs beside weights and KV pool: an upper bound,
    explained in `spans/protocol/buffers.py`.
    """
    width = span_row_width(graph, stage, checkpoint)
    num_ids = max(sizes.head, sizes.embedding) // (width * dtype.itemsize)
    return buffer_bytes(
        limits, device_kind=device_kind, row_width=width, num_ids=num_ids, itemsize=dtype.itemsize
    )


def _sized(graph: str, stage: StageName) -> SizedStage:
    found = _STAGES.get((graph, stage))
    if found is None:
        known = ", ".join(f"{name} of graph {of}" for of, name in _STAGES)
        raise ConfigError(
            f"stage: the layers of {stage} of graph {graph} cannot be divided; those of {known} "
            "can be",
            param="stage",
        )
    return found
