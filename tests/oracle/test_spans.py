"""Spans of layers, each loaded separately, compute together the results of the whole model, to the
byte.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.tiles import TILE_ROWS, padded
from fleet.models.causal_lm.load import load_model, read_config
from fleet.models.causal_lm.norms import fuse_norms
from fleet.models.causal_lm.parts import Parts
from fleet.models.causal_lm.probe import probe
from fleet.models.causal_lm.span import SpanModel
from fleet.models.causal_lm.span_load import load_span, model_sizes
from fleet.models.checkpoint import INDEX, file_of_each_weight
from fleet.spans.protocol.layers import LayerSpan
from tests.oracle.oracle import from_pretrained
from tests.oracle.test_text_engine import FAMILIES, Family, write_model

pytestmark = pytest.mark.one_file_in(4, "spans of an engine")

NUM_LAYERS = 3
SPLITS = (
    ("0:0", "1:output"),
    ("0:1", "2:output"),
    ("0:0", "1:1", "2:output"),
    ("0:output",),
    ("0:0", "1:last"),
    ("0:0", "1:1", "2:last"),
)
SEPARATE_HEADS = ("lm_head.weight", "output_projection.weight")
IDS = (5, 9, 200, 31, 77, 77, 2, 8, 100, 12, 13)


def spans_of(folder: Path, notations: Sequence[str], anchor: int = 0) -> list[SpanModel]:
    """Load spans; the span at index `anchor` gets the embedding."""
    spans = [LayerSpan.parse(each, "spans") for each in notations]
    has_head = spans[-1].has_output
    return [
        load_span(
            folder,
            span,
            torch.float32,
            with_embedding=number == anchor,
            with_head=number == anchor and not has_head,
        )
        for number, span in enumerate(spans)
    ]


def layout(shape: KVShape, num_layers: int) -> RowLayout:
    """Return the attention layout of one request's first rows, in a KV pool of its own."""
    own = KVShape(num_layers=num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    pool = KVPool(own, num_pages=4, page_size=16, dtype=torch.float32, device=torch.device("cpu"))
    table = pool.open_table()
    assert pool.grow(table, len(IDS))
    return RowLayout(pool, [Extent(table=table, start=0, stop=len(IDS))], TILE_ROWS)


@torch.inference_mode()
def logits_of_spans(spans: Sequence[SpanModel], shape: KVShape, anchor: int = 0) -> Tensor:
    rows = padded(spans[anchor].embed(torch.tensor(IDS)))
    for each in spans:
        rows = each.forward(rows, layout(shape, each.kv_shape.num_layers)).rows_NH
    return (
        spans[-1].head(rows) if spans[-1].span.has_output else spans[0].head(spans[0].finish(rows))
    )


@torch.inference_mode()
def whole_logits(folder: Path) -> tuple[Tensor, KVShape]:
    config = read_config(folder)
    model = load_model(folder, config.model_type, torch.float32)
    fuse_norms(model)
    parts = Parts(model)
    shape = probe(config, parts, torch.device("cpu"))
    rows = padded(parts.embed(torch.tensor(IDS)))
    return parts.head(parts.body(rows, layout(shape, NUM_LAYERS))), shape


def layer_of(weight: str) -> int | None:
    """Return the layer number of a weight, named as in the model or in a checkpoint."""
    found = re.search(r"(?:^|\.)(?:layers|h)\.([0-9]+)\.", weight)
    return None if found is None else int(found[1])


def write_sharded(family: Family, folder: Path) -> None:
    """Write the model's weights in files of a few weights each."""
    write_model(family, folder)
    from_pretrained("AutoModelForCausalLM", folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_spans_of_an_architecture_together_equal_the_whole_model(
    family: Family, tmp_path: Path
) -> None:
    folder = write_model(family, tmp_path)
    expected, shape = whole_logits(folder)
    for notations in SPLITS:
        for anchor in {0, len(notations) - 1} if "output" in notations[-1] else {0}:
            logits = logits_of_spans(spans_of(folder, notations, anchor), shape, anchor)
            assert torch.equal(logits, expected), (notations, anchor)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_span_computes_the_same_while_another_one_is_loaded(family: Family, tmp_path: Path) -> None:
    """A span computes the same while a second span is loaded; `transformers` then changes the
    default dtype of the process.
    """
    folder = write_model(family, tmp_path)
    expected, shape = whole_logits(folder)
    spans = spans_of(folder, SPLITS[0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        logits = logits_of_spans(spans, shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_span_holds_the_weights_of_its_layers_only(family: Family, tmp_path: Path) -> None:
    """A span holds only the weights of its layers. The anchor (here the first span) also has the
    embedding; the last span has the norm and the output head, which may be the embedding.
    """
    write_sharded(family, tmp_path)
    spans = spans_of(tmp_path, SPLITS[2])
    for each in spans:
        layers = {layer_of(name) for name in each.weights()} - {None}
        assert layers == {each.span.first} and not any(
            weight.is_meta for weight in each.weights().values()
        )
    first, middle, last = (
        [name for name in each.weights() if layer_of(name) is None] for each in spans
    )
    assert (
        not middle
        and any("emb" in name or "wte" in name for name in first)
        and not set(first) & set(SEPARATE_HEADS)
    )
    assert any("norm" in name or "ln_f" in name for name in last)
    tied = bool(getattr(read_config(tmp_path), "tie_word_embeddings", True))
    assert any("emb" in name or "wte" in name for name in last) == tied


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_sizes_from_the_configuration_are_those_of_the_loaded_weights(
    family: Family, tmp_path: Path
) -> None:
    folder = write_model(family, tmp_path)
    sizes = model_sizes(folder, torch.float32, num_positions=0, buffer_bytes=0)
    for anchor in (0, 2):
        for number, each in enumerate(spans_of(folder, SPLITS[2], anchor)):
            loaded = {weight.data_ptr(): weight.nbytes for weight in each.weights().values()}
            assert sum(loaded.values()) == sizes.bytes_of(each.span, is_anchor=number == anchor)


def test_sizes_count_keys_and_values_of_the_given_positions(tmp_path: Path) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    sizes = model_sizes(folder, torch.float32, num_positions=100, buffer_bytes=5)
    _, shape = whole_logits(folder)
    assert (
        sizes.kv_bytes * NUM_LAYERS == 100 * shape.page_bytes(1, torch.float32)
        and sizes.buffer_bytes == 5
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_span_loads_without_the_files_that_have_none_of_its_weights(
    family: Family, tmp_path: Path
) -> None:
    write_sharded(family, tmp_path)
    shards = file_of_each_weight(tmp_path)
    needed = {file for weight, file in shards.items() if layer_of(weight) == 1}
    others = set(shards.values()) - needed
    for file in others:
        file.unlink()
    assert others and spans_of(tmp_path, ["1:1"], anchor=1)[0].weights()


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("layers.1.", "has no weights of layers 1:1"),
        ("layers.1.mlp", "lacks [0-9]+ weights of llama"),
    ],
)
def test_span_with_missing_weights_is_refused_and_others_load(
    lacking: str, message: str, tmp_path: Path
) -> None:
    write_sharded(FAMILIES[0], tmp_path)
    index = tmp_path / INDEX
    weight_map = {
        weight: file
        for weight, file in json.loads(index.read_text())["weight_map"].items()
        if lacking not in weight
    }
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ConfigError, match=message) as refused:
        spans_of(tmp_path, ["1:1"], anchor=1)
    assert str(tmp_path) in refused.value.message
    assert spans_of(tmp_path, ["0:0", "2:output"])


def test_span_beyond_the_last_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1:3 names layer 3, but the model's last layer is 2"):
        spans_of(write_model(FAMILIES[0], tmp_path), ["1:3"])
