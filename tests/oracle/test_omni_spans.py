"""Spans of the Thinker's and the Talker's layers, each loaded separately, compute together the
results of all layers in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineRequest
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import tiles
from fleet.engine.torch.program import Forwarded
from fleet.engine.torch.tiles import TILE_ROWS, padded
from fleet.models.qwen3_omni.config import DividedStage
from fleet.models.qwen3_omni.talker import CODES, VOICE, Talker, TalkerTask
from fleet.models.qwen3_omni.thinker import Thinker, ThinkerTask
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.torch.model import SpanComputer, last_rows
from tests.oracle.omni_divisions import (
    CPU,
    DIVISIONS,
    FLOAT32,
    NUM_POSITIONS,
    PAGE_SIZE,
    Division,
    load_program,
    load_worker,
    open_reader,
)

PASSES = (
    ((0, 0, 19),),
    ((0, 19, 24), (1, 0, 7)),
    ((0, 24, 25), (1, 7, 8)),
    ((1, 8, 9), (2, 0, 33)),
    ((0, 25, 26), (2, 33, 34)),
)
"""Passes, each a tuple of extents (request, first position, end): prompts in chunks of more and
less than a tile, and decode steps.
"""
Work = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Results of a pass: final hidden states, the hidden states that enter the tapped layer, and
    the logits of each extent's last row.
    """

    final_NH: Tensor
    tapped_NH: Tensor | None
    logits_SV: Tensor


class RequestMemory:
    """KV cache of the requests in one process."""

    def __init__(self, shape: KVShape) -> None:
        self.pool = KVPool(
            shape,
            num_pages=3 * NUM_POSITIONS // PAGE_SIZE,
            page_size=PAGE_SIZE,
            dtype=FLOAT32,
            device=CPU,
        )
        self._tables = [self.pool.open_table() for _ in range(3)]

    def extents(self, work: Work) -> list[Extent]:
        for request, _, stop in work:
            assert self.pool.grow(self._tables[request], stop)
        return [
            Extent(table=self._tables[request], start=start, stop=stop)
            for request, start, stop in work
        ]


class DividedModel:
    """Processes that hold the spans of a division."""

    def __init__(self, folder: Path, division: Division, *, tiled: bool) -> None:
        anchor = division.anchor % len(division.spans)
        self._computers: list[SpanComputer] = []
        self._memories: list[RequestMemory] = []
        for number, span in enumerate(division.spans):
            reader, stage = open_reader(folder), division.stage
            if number == anchor:
                layers = load_program(
                    reader, folder, stage, span, tiled=tiled, with_head=division.with_head
                ).layers
            else:
                layers = load_worker(reader, folder, stage, span, tiled=tiled)
            self._memories.append(RequestMemory(layers.kv_shape))
            self._computers.append(SpanComputer(layers, self._memories[-1].pool, tiled=tiled))
        ends_with_head = LayerSpan.parse(division.spans[-1], "spans").has_output
        self._anchor, self._with_head = (
            self._computers[anchor],
            self._computers[-1 if ends_with_head else anchor],
        )

    def run(self, rows_NH: Tensor, work: Work) -> PassResult:
        taps: list[Tensor] = []
        extents: list[Extent] = []
        for computer, memory in zip(self._computers, self._memories, strict=True):
            extents = memory.extents(work)
            done = computer.run(rows_NH, extents)
            rows_NH = done.rows_NH
            taps += [done.tapped_NH] if done.tapped_NH is not None else []
        assert len(taps) <= 1
        last_SH = last_rows(rows_NH, extents, [True] * len(extents))
        if self._with_head is not self._computers[-1]:
            rows_NH, last_SH = self._anchor.finish(rows_NH), self._anchor.finish(last_SH)
        return PassResult(
            final_NH=rows_NH,
            tapped_NH=next(iter(taps), None),
            logits_SV=self._with_head.head(last_SH),
        )


class WholeModel:
    """Model with all layers in one process, computed by the stage's program."""

    def __init__(self, folder: Path, stage: DividedStage, *, tiled: bool) -> None:
        self._program, self._tiled = (
            load_program(open_reader(folder), folder, stage, tiled=tiled),
            tiled,
        )
        self._memory = RequestMemory(self._program.kv_shape)
        self._computer = SpanComputer(self._program.layers, self._memory.pool, tiled=tiled)

    def run(self, rows_NH: Tensor, work: Work) -> PassResult:
        extents = self._memory.extents(work)
        parts = self._tiles(rows_NH, extents) if self._tiled else [self._together(rows_NH, extents)]
        taps = [part.tapped_NH for part in parts if part.tapped_NH is not None]
        final_NH = torch.cat([part.last_NH for part in parts])[: len(rows_NH)]
        logits_SV = self._computer.head(last_rows(final_NH, extents, [True] * len(extents)))
        tapped_NH = torch.cat(taps)[: len(rows_NH)] if taps else None
        return PassResult(final_NH=final_NH, tapped_NH=tapped_NH, logits_SV=logits_SV)

    def _together(self, rows_NH: Tensor, extents: Sequence[Extent]) -> Forwarded:
        return self._program.forward(rows_NH, FastLayout(self._memory.pool, extents), ())

    def _tiles(self, rows_NH: Tensor, extents: Sequence[Extent]) -> list[Forwarded]:
        groups = tiles([(None, extent) for extent in extents])
        layouts = [
            RowLayout(self._memory.pool, [extent for _, extent in group], TILE_ROWS)
            for group in groups
        ]
        parts = zip(rows_NH.split(TILE_ROWS), layouts, strict=True)
        return [self._program.forward(padded(tile_NH), layout, ()) for tile_NH, layout in parts]


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@torch.inference_mode()
def test_spans_of_a_decoder_together_equal_the_whole_one(
    division: Division, numerics: str, tiny_checkpoint: Path
) -> None:
    tiled = numerics == "invariant"
    whole = WholeModel(tiny_checkpoint, division.stage, tiled=tiled)
    divided = DividedModel(tiny_checkpoint, division, tiled=tiled)
    rows = torch.randn(3, NUM_POSITIONS, 128, generator=torch.Generator().manual_seed(1))
    for work in PASSES:
        rows_NH = torch.cat([rows[request, start:stop] for request, start, stop in work])
        expected, result = whole.run(rows_NH, work), divided.run(rows_NH, work)
        assert (result.tapped_NH is not None) == (division.stage == "thinker")
        pairs = [(expected.final_NH, result.final_NH), (expected.logits_SV, result.logits_SV)]
        if expected.tapped_NH is not None and result.tapped_NH is not None:
            pairs.append((expected.tapped_NH, result.tapped_NH))
        for one, other in pairs:
            assert torch.equal(one, other) if tiled else torch.allclose(one, other, atol=1e-5)


def thinker_tasks(program: Thinker) -> list[ThinkerTask]:
    tasks: list[ThinkerTask] = []
    for number in range(2):
        sampling = Sampling(temperature=0.9, seed=number)
        tasks.append(
            program.open(EngineRequest(request_id=RequestId(str(number)), sampling=sampling))
        )
        tasks[-1].feed(
            EngineInput(
                walk=Walk("prefill"), arrays={"ids": np.array([5, 9, 31], np.int32)}, final=True
            )
        )
    return tasks


@torch.inference_mode()
def test_thinker_without_head_draws_from_the_logits_of_a_span_worker(tiny_checkpoint: Path) -> None:
    whole, anchor = (
        cast(Thinker, load_program(open_reader(tiny_checkpoint), tiny_checkpoint, "thinker", span))
        for span in (None, "0:1")
    )
    worker = load_worker(open_reader(tiny_checkpoint), tiny_checkpoint, "thinker", "2:output")
    last_SH = torch.randn(2, 128)
    expected = whole.draw(thinker_tasks(whole), last_SH)
    drawn = anchor.draw_from(thinker_tasks(anchor), worker.head(last_SH))
    assert [each.arrays[TOKEN].tolist() for (each,) in drawn] == [
        each.arrays[TOKEN].tolist() for (each,) in expected
    ]


def talker_tasks(program: Talker) -> list[TalkerTask]:
    tasks: list[TalkerTask] = []
    for number in range(2):
        sampling = Sampling(temperature=0.9, top_k=50, ignore_eos=True, seed=number)
        request = EngineRequest(
            request_id=RequestId(str(number)), sampling=sampling, params={VOICE: "chelsie"}
        )
        tasks.append(program.open(request))
        ids = np.array([5, 9, 31], np.int32)
        tasks[-1].feed(
            EngineInput(walk=Walk("prefill"), arrays={"ids": ids, "header": ids}, final=True)
        )
    return tasks


@torch.inference_mode()
def test_talker_anchor_draws_frames_from_the_last_rows_of_a_span_worker(
    tiny_checkpoint: Path,
) -> None:
    whole, anchor = (
        cast(Talker, load_program(open_reader(tiny_checkpoint), tiny_checkpoint, "talker", span))
        for span in (None, "0:0")
    )
    last_SH = torch.randn(2, 128)
    expected = whole.draw(talker_tasks(whole), whole.layers.finish(last_SH))
    drawn = anchor.draw(talker_tasks(anchor), anchor.layers.finish(last_SH))
    assert [each.arrays[CODES].tolist() for (each,) in drawn] == [
        each.arrays[CODES].tolist() for (each,) in expected
    ]
