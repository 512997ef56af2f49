"""Spans of the Thinker and the Talker load only the files with their own weights, and have the
planned sizes.
"""

import json
import re
from collections import defaultdict
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.models.checkpoint import INDEX, file_of_each_weight
from fleet.models.qwen3_omni.config import DividedStage, read_config
from fleet.models.qwen3_omni.span import OmniSpan, StageDecoder
from fleet.models.qwen3_omni.span_sizes import decoder_sizes, stage_sizes
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.lm_setup import prepare_stage
from fleet.stages.qwen3_omni.spans import anchor_reader, load_stage_span
from tests.oracle.omni_divisions import (
    DIVISIONS,
    FLOAT32,
    NUM_POSITIONS,
    PAGE_SIZE,
    Division,
    load_program,
    load_worker,
    open_reader,
)
from tests.stage_options import stage_options

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
"""Prefixes of an anchor's weights other than its layers, norm and head."""


def write_in_parts(checkpoint: Path, folder: Path, *, tied: bool = False) -> Path:
    """Write the checkpoint with one file per layer, and several for the other weights. `tied`:
    whether the Thinker's output head is its embedding.
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
    """Delete the weight files that contain none of these weights."""
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
    """Return the size in bytes of a span's weights, its KV pool of `NUM_POSITIONS`, and its table
    of rotary embeddings.
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
