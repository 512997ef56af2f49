"""Spans of the Thinker's and the Talker's layers, each loaded by itself, compute together what all
layers in one process do.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.core.ids import RequestId, StageName, Walk
from fleet.core.request import Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineRequest
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.experts import Experts, grouped_experts, tiled_experts
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import tiles
from fleet.engine.torch.program import Forwarded
from fleet.engine.torch.tiles import TILE_ROWS, padded
from fleet.models.checkpoint import INDEX, CheckpointReader, WeightReader, file_of_each_weight
from fleet.models.qwen3_omni.config import DividedStage, read_config
from fleet.models.qwen3_omni.span import OmniSpan, StageDecoder, load_omni_span
from fleet.models.qwen3_omni.span_sizes import decoder_sizes, stage_sizes
from fleet.models.qwen3_omni.talker import CODES, VOICE, Talker, TalkerTask
from fleet.models.qwen3_omni.thinker import Thinker, ThinkerTask
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.torch.model import SpanComputer, last_rows
from fleet.stages.lm_setup import prepare_stage
from fleet.stages.qwen3_omni.spans import anchor_reader, load_stage_span
from tests.stage_options import stage_options

CPU, FLOAT32 = torch.device("cpu"), torch.float32
NUM_POSITIONS, PAGE_SIZE = 128, 16
FIRST, LAST = 0, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A division of a stage's layers, and the index of the anchor's span. `with_head`: of a
    Thinker's anchor.
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
PASSES = (
    ((0, 0, 19),),
    ((0, 19, 24), (1, 0, 7)),
    ((0, 24, 25), (1, 7, 8)),
    ((1, 8, 9), (2, 0, 33)),
    ((0, 25, 26), (2, 33, 34)),
)
"""Request, first position and end of each extent: prompts in chunks of more and less than a tile,
and rows of decode steps.
"""
Work = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Final rows, the rows that enter the tapped layer, and the logits of each extent's last
    row.
    """

    final_NH: Tensor
    tapped_NH: Tensor | None
    logits_SV: Tensor


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


class RequestMemory:
    """Keys and values of the requests in one process."""

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
    """The processes that hold a division's spans."""

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
    """All layers in one process, computed by the program."""

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


OWN_LAYER = re.compile(r"(thinker|talker)\.model\.layers\.([0-9]+)\.")
ENDS = {
    "thinker": ["thinker.model.norm.weight", "thinker.lm_head.weight"],
    "talker": ["talker.model.norm.weight", "talker.codec_head.weight"],
}
EMBEDDING = "thinker.model.embed_tokens.weight"
BESIDE = {
    "thinker": (EMBEDDING, "thinker.audio_tower."),
    "talker": (
        EMBEDDING,
        "talker.model.codec_embedding.",
        "talker.text_",
        "talker.hidden_",
        "talker.code_predictor.",
    ),
}
"""Prefixes of the weights of an anchor beside its layers, norm and head."""


def write_in_parts(checkpoint: Path, folder: Path, *, tied: bool = False) -> Path:
    """Write the checkpoint with a file for each layer, and several for the rest. `tied`: the
    Thinker's head is its embedding.
    """
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for file in set(file_of_each_weight(checkpoint).values()):
        for name, weight in load_file(file).items():
            layer = OWN_LAYER.match(name)
            parts[layer[0] if layer else ".".join(name.split(".")[:3])][name] = weight
    if tied:
        del parts[ENDS["thinker"][1]]
    for part, weights in parts.items():
        save_file(weights, folder / f"{part}safetensors")
    weight_map = {name: f"{part}safetensors" for part, weights in parts.items() for name in weights}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((checkpoint / "config.json").read_text())
    config["thinker_config"]["text_config"]["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def names_of_span(
    folder: Path, stage: DividedStage, span: str, *, with_head: bool = False
) -> set[str]:
    own = LayerSpan.parse(span, "spans")
    found = {name: OWN_LAYER.match(name) for name in file_of_each_weight(folder)}
    last = own.last if own.last is not None else 99
    layers = {
        name
        for name, layer in found.items()
        if layer and layer[1] == stage and own.first <= int(layer[2]) <= last
    }
    return layers | set(ENDS[stage] if own.has_output or with_head else [])


def names_beside(folder: Path, stage: DividedStage) -> set[str]:
    return {name for name in file_of_each_weight(folder) if name.startswith(BESIDE[stage])}


def keep_files_of(folder: Path, names: set[str]) -> None:
    """Delete the files that have none of these weights."""
    files = file_of_each_weight(folder)
    others = set(files.values()) - {files[name] for name in names}
    assert others
    for file in others:
        file.unlink()


@pytest.mark.parametrize(
    ("stage", "span"),
    [
        ("thinker", "0:1"),
        ("thinker", "1:last"),
        ("thinker", "3:output"),
        ("talker", "0:0"),
        ("talker", "1:last"),
    ],
)
def test_span_worker_loads_from_the_files_of_its_own_weights(
    stage: DividedStage, span: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = write_in_parts(tiny_checkpoint, tmp_path)
    expected = names_of_span(folder, stage, span)
    keep_files_of(folder, expected)
    reader = open_reader(folder)
    layers = load_worker(reader, folder, stage, span)
    assert sorted(reader.names) == sorted(expected)
    stored = StageDecoder.of(stage, reader, read_config(folder))
    assert sorted(stored.weights_of(reader, layers.span)) == sorted(expected)
    assert (
        layers.hidden_size == 128
        and layers.kv_shape.num_layers == layers.span.final - layers.span.first + 1
    )
    shares: list[float] = []
    options = stage_options(stage=StageName(stage), checkpoint=folder, progress=shares.append)
    built = load_stage_span(options, stage, LayerSpan.parse(span, "spans"))
    assert built.layers.span == layers.span and built.num_bytes == sum(
        each.nbytes for each in layers.weights().values()
    )
    assert shares == sorted(shares) and len(shares) == len(expected) and shares[-1] == 1.0


@pytest.mark.parametrize(
    ("stage", "span", "with_head"),
    [
        ("thinker", "0:0", False),
        ("thinker", "0:1", True),
        ("thinker", "2:output", False),
        ("talker", "0:0", True),
    ],
)
def test_anchor_loads_from_the_files_of_its_own_weights(
    stage: DividedStage, span: str, with_head: bool, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = write_in_parts(tiny_checkpoint, tmp_path)
    expected = names_of_span(folder, stage, span, with_head=with_head) | names_beside(folder, stage)
    keep_files_of(folder, expected)
    shares: list[float] = []
    setup = prepare_stage(
        stage_options(stage=StageName(stage), checkpoint=folder, progress=shares.append)
    )
    with_head |= stage == "talker"
    reader = anchor_reader(
        setup, read_config(folder), stage, LayerSpan.parse(span, "spans"), with_head=with_head
    )
    load_program(reader, folder, stage, span, with_head=with_head)
    assert sorted(reader.names) == sorted(expected) and shares[-1] == 1.0 > shares[-2]


@pytest.mark.parametrize(("stage", "last"), [("thinker", 3), ("talker", 2)])
def test_span_beyond_the_last_layer_of_a_stage_is_refused(
    stage: DividedStage, last: int, tiny_checkpoint: Path
) -> None:
    with pytest.raises(
        ConfigError, match=f"1:7 names layer 7, but the model's last layer is {last}"
    ):
        load_worker(open_reader(tiny_checkpoint), tiny_checkpoint, stage, "1:7")


def test_thinker_notes_that_a_span_worker_has_the_accept_layer(tiny_checkpoint: Path) -> None:
    elsewhere = {
        span: load_program(
            open_reader(tiny_checkpoint), tiny_checkpoint, "thinker", span
        ).taps_elsewhere
        for span in ("0:output", "0:1", "0:2", "2:output", "3:output")
    }
    assert elsewhere == {
        "0:output": False,
        "0:1": True,
        "0:2": False,
        "2:output": False,
        "3:output": True,
    }


def bytes_held(layers: OmniSpan) -> int:
    """Return the bytes of a span's weights, of its pool of `NUM_POSITIONS`, and of its table of
    rotary embeddings.
    """
    pages = NUM_POSITIONS // PAGE_SIZE * layers.kv_shape.page_bytes(PAGE_SIZE, FLOAT32)
    weights = {weight.data_ptr(): weight.nbytes for weight in layers.weights().values()}
    return (
        sum(weights.values())
        + pages
        + 2 * NUM_POSITIONS * layers.kv_shape.head_dim * FLOAT32.itemsize
    )


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_from_file_headers_are_those_of_the_loaded_weights(
    division: Division, tied: bool, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder, stage = write_in_parts(tiny_checkpoint, tmp_path, tied=tied), division.stage
    headers, config = open_reader(folder), read_config(folder)
    sizes = decoder_sizes(
        headers,
        config,
        stage,
        FLOAT32,
        num_positions=NUM_POSITIONS,
        buffer_bytes=0,
        head_on_anchor=division.with_head,
    )
    assert not headers.names
    for number, span in enumerate(division.spans):
        reader, is_anchor = open_reader(folder), number == division.anchor % len(division.spans)
        if is_anchor:
            layers = load_program(reader, folder, stage, span, with_head=division.with_head).layers
            head_is_embedding = tied and stage == "thinker" and layers.head_VH is not None
            beside = names_beside(folder, stage) - ({EMBEDDING} if head_is_embedding else set())
        else:
            layers, beside = load_worker(reader, folder, stage, span), set[str]()
        assert beside <= set(reader.names)
        added = sum(prod(reader.shape(name)) for name in beside) * FLOAT32.itemsize
        assert sizes.bytes_of(layers.span, is_anchor=is_anchor) == bytes_held(layers) + added, span


@pytest.mark.parametrize("stage", ["thinker", "talker"])
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_by_the_configuration_alone_are_those_from_file_headers(
    stage: DividedStage, tied: bool, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = write_in_parts(tiny_checkpoint, tmp_path, tied=tied)
    by_headers = decoder_sizes(
        open_reader(folder),
        read_config(folder),
        stage,
        FLOAT32,
        num_positions=NUM_POSITIONS,
        buffer_bytes=7,
    )
    keep_files_of(folder, set())
    assert (
        stage_sizes(stage, folder, FLOAT32, num_positions=NUM_POSITIONS, buffer_bytes=7)
        == by_headers
    )


@torch.inference_mode()
def test_tied_head_of_an_anchor_is_its_embedding(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_in_parts(tiny_checkpoint, tmp_path, tied=True)
    reader = open_reader(folder)
    anchor = load_program(reader, folder, "thinker", "0:0", with_head=True)
    assert reader.names.count(EMBEDDING) == 1
    worker = load_worker(open_reader(folder), folder, "thinker", "2:output")
    last_SH = torch.randn(3, 128)
    assert torch.equal(anchor.layers.head(last_SH), worker.head(last_SH))


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
