"""Sizes of the stages whose layers can be divided, from a checkpoint's configuration and the headers of its weight files.

One row per stage. Knows no budget and no deployment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.core.span_plan import ModelSizes
from fleet.graphs.text import LM, TEXT
from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.span_load import model_sizes


class ReadsSizes(Protocol):
    """Function that returns the sizes of one model. Raises: ConfigError."""

    def __call__(self, folder: Path, dtype: torch.dtype, *, num_positions: int, buffer_bytes: int) -> ModelSizes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedStage:
    """Readers of a stage's model. `row_width`: numbers in one row between its layers."""

    sizes: ReadsSizes
    row_width: Callable[[Path], int]


def _hidden_size(folder: Path) -> int:
    return int(read_config(folder).hidden_size)


_STAGES: dict[tuple[str, StageName], SizedStage] = {
    (TEXT.name, LM): SizedStage(sizes=model_sizes, row_width=_hidden_size),
}  # fmt: skip


def span_sizes(
    graph: str, stage: StageName, checkpoint: Path, dtype: torch.dtype, *, num_positions: int, buffer_bytes: int
) -> ModelSizes:
    """Return the sizes of a stage's model. No weight is read.

    `num_positions`: those whose keys and values each process is to hold. Raises: ConfigError if the stage cannot be divided,
    naming those that can be, or for a checkpoint that cannot be read.
    """
    return _sized(graph, stage).sizes(checkpoint, dtype, num_positions=num_positions, buffer_bytes=buffer_bytes)


def span_row_width(graph: str, stage: StageName, checkpoint: Path) -> int:
    """Return how many numbers a row between the layers of a stage's model has. Raises: ConfigError as `span_sizes`."""
    return _sized(graph, stage).row_width(checkpoint)


def _sized(graph: str, stage: StageName) -> SizedStage:
    found = _STAGES.get((graph, stage))
    if found is None:
        known = ", ".join(f"{name} of graph {of}" for of, name in _STAGES)
        raise ConfigError(
            f"stage: the layers of {stage} of graph {graph} cannot be divided; those of {known} can be", param="stage"
        )
    return found
