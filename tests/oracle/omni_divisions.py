"""Divisions of the Thinker's and the Talker's layers into spans, and loading of these spans."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fleet.engine.torch.experts import Experts, grouped_experts, tiled_experts
from fleet.models.checkpoint import CheckpointReader, WeightReader
from fleet.models.qwen3_omni.config import DividedStage, read_config
from fleet.models.qwen3_omni.span import OmniSpan, load_omni_span
from fleet.models.qwen3_omni.talker import Talker
from fleet.models.qwen3_omni.thinker import Thinker
from fleet.spans.protocol.layers import LayerSpan

CPU, FLOAT32 = torch.device("cpu"), torch.float32
NUM_POSITIONS, PAGE_SIZE = 128, 16
FIRST, LAST = 0, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A division of a stage's layers into spans.

    `anchor`: index in `spans` of the anchor's span. `with_head`: whether the anchor has the output
    head although its span does not include it (Thinker only).
    """

    stage: DividedStage
    spans: tuple[str, ...]
    anchor: int
    with_head: bool = False

    def __str__(self) -> str:
        ends = "last" if self.anchor == LAST else "first"
        return f"{self.stage}-{'-'.join(self.spans)}-anchor-{ends}"


DIVISIONS = (
    Division(stage="thinker", spans=("0:output",), anchor=FIRST),
    Division(stage="thinker", spans=("0:1", "2:output"), anchor=FIRST),
    Division(stage="thinker", spans=("0:0", "1:2", "3:output"), anchor=FIRST),
    Division(stage="thinker", spans=("0:2", "3:last"), anchor=FIRST, with_head=True),
    Division(stage="thinker", spans=("0:0", "1:2", "3:last"), anchor=FIRST, with_head=True),
    Division(stage="thinker", spans=("0:1", "2:output"), anchor=LAST),
    Division(stage="thinker", spans=("0:0", "1:2", "3:output"), anchor=LAST),
    Division(stage="talker", spans=("0:output",), anchor=FIRST),
    Division(stage="talker", spans=("0:0", "1:last"), anchor=FIRST),
    Division(stage="talker", spans=("0:0", "1:1", "2:last"), anchor=FIRST),
    Division(stage="talker", spans=("0:1", "2:output"), anchor=LAST),
    Division(stage="talker", spans=("0:0", "1:1", "2:output"), anchor=LAST),
)


def experts_of(*, tiled: bool) -> Experts:
    return tiled_experts if tiled else grouped_experts


def open_reader(folder: Path) -> CheckpointReader:
    return CheckpointReader(folder, device=CPU, dtype=FLOAT32)


def load_program(
    reader: WeightReader,
    folder: Path,
    stage: DividedStage,
    span: str | None = None,
    *,
    tiled: bool = False,
    with_head: bool = False,
) -> Thinker | Talker:
    config, own, experts = (
        read_config(folder),
        LayerSpan.parse(span, "spans") if span else None,
        experts_of(tiled=tiled),
    )
    if stage == "talker":
        return Talker(reader, config, experts, NUM_POSITIONS, tiled=tiled, span=own)
    ends = frozenset([config.im_end_token_id])
    return Thinker(
        reader,
        config,
        ends,
        experts,
        NUM_POSITIONS,
        one_by_one=tiled,
        span=own,
        with_head=with_head,
    )


def load_worker(
    reader: CheckpointReader, folder: Path, stage: DividedStage, span: str, *, tiled: bool = False
) -> OmniSpan:
    own = LayerSpan.parse(span, "spans")
    return load_omni_span(
        reader, read_config(folder), stage, own, experts_of(tiled=tiled), NUM_POSITIONS
    )
