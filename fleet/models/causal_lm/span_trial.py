"""Test of whether an architecture can be divided into spans: a small random model of the same kind,
run whole and as two spans, must give equal logits.

A model that is divided is never run whole, so `probe` could not reject it otherwise. The small
model has few layers, heads, experts and ids, but the checkpoint's kinds of layers, head size and
switches. Legend: N positions, V vocabulary.
"""

import copy
import logging
import tempfile
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from fleet.core.errors import ConfigError
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.tiles import TILE_ROWS, padded
from fleet.models.causal_lm.load import LOAD_ERRORS, load_model, refusing
from fleet.models.causal_lm.norms import fuse_norms
from fleet.models.causal_lm.paged import register
from fleet.models.causal_lm.parts import Parts
from fleet.models.causal_lm.probe import probe
from fleet.models.causal_lm.span_load import load_span
from fleet.spans.protocol.layers import LayerSpan

log = logging.getLogger(__name__)

MIN_LAYERS, NUM_HEADS, NUM_IDS, WIDTH, WINDOW, NUM_EXPERTS = 3, 4, 128, 64, 8, 4
IDS = tuple(range(5, 16))
"""Token ids of the test's text, which is longer than the small model's sliding window."""
TOLERANCE = 1e-4
"""Largest difference of logits that counts as equal without invariant numerics, relative to the
largest logit.
"""


def try_division(folder: Path, *, tiled: bool) -> None:
    """Check that a small random model of a checkpoint's architecture gives the same logits whole
    and in two spans, on the CPU in float32.

    `tiled`: numerics are invariant, so that the logits must be equal bit by bit. Raises:
    ConfigError if the logits differ, or if the architecture cannot be served. An architecture of
    which no small model can be made is not checked, and the log says so.
    """
    register()
    config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    kind = config.get_text_config().model_type
    with tempfile.TemporaryDirectory(prefix="fleet-trial-") as path:
        small = Path(path)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                AutoModelForCausalLM.from_config(small_config(config)).save_pretrained(small)
        except LOAD_ERRORS as error:
            log.warning(
                "the division of %s is not tried beforehand: no small model of it can be made: %s",
                kind,
                error,
            )
            return
        with refusing(folder, f"{kind} cannot be divided into spans"):
            try:
                whole, split = _whole_and_split(small, kind)
            except ConfigError as error:
                raise ConfigError(
                    error.message.replace(path, str(folder)), param=error.param
                ) from error
        is_close = (
            torch.equal(whole, split)
            if tiled
            else bool((whole - split).abs().max() <= TOLERANCE * whole.abs().max())
        )
    if not is_close:
        raise ConfigError(
            f"checkpoint {folder}: {kind} cannot be divided into spans: a small random model of "
            "this kind gives other results "
            "when it is divided; remove spans, or give a checkpoint of another architecture",
            param="checkpoint",
        )


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a small model of the same architecture, with every kind of layer
    that `config` has.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    num_layers, num_heads = int(text.num_hidden_layers), int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    kinds = list(getattr(text, "layer_types", None) or ())
    first_of_each = [kinds.index(kind) for kind in set(kinds)]
    num_kept = min(num_layers, max([MIN_LAYERS, *(first + 1 for first in first_of_each)]))
    had = text.hidden_size
    text.hidden_size = NUM_HEADS * head_dim
    text.num_attention_heads = NUM_HEADS
    text.num_hidden_layers = num_kept
    kv_heads = getattr(text, "num_key_value_heads", None)
    if kv_heads is not None:
        text.num_key_value_heads = (
            NUM_HEADS if kv_heads == num_heads else max(1, NUM_HEADS * kv_heads // num_heads)
        )
    for name, value in list(vars(text).items()):
        if (
            isinstance(value, list)
            and len(cast("list[object]", value)) == num_layers
            and "layer" in name
        ):
            setattr(text, name, value[:num_kept])
        elif (
            name
            in (
                "intermediate_size",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
                "ffn_dim",
            )
            and value
        ):
            setattr(text, name, WIDTH)
        elif name in ("num_experts", "num_local_experts") and value:
            setattr(text, name, NUM_EXPERTS)
        elif name == "num_experts_per_tok" and value:
            text.num_experts_per_tok = min(value, NUM_EXPERTS)
        elif name == "sliding_window" and value:
            text.sliding_window = WINDOW
        elif name == "word_embed_proj_dim":
            text.word_embed_proj_dim = text.hidden_size if value == had else text.hidden_size // 2
        elif name.endswith("_token_id") and value is not None:
            setattr(text, name, 0)
    text.vocab_size = NUM_IDS
    vision = getattr(small, "vision_config", None)
    if vision is not None:
        vision.num_hidden_layers = 1
    return small


@torch.inference_mode()
def _whole_and_split(folder: Path, kind: str) -> tuple[Tensor, Tensor]:
    """Return the logits [N, V] of the small model in `folder`, run whole and run as two spans.
    Raises: ConfigError; ValueError from `probe`.
    """
    model = load_model(folder, kind, torch.float32)
    fuse_norms(model)
    parts, config = Parts(model), model.config.get_text_config()
    shape = probe(config, parts, torch.device("cpu"))
    rows = padded(parts.embed(torch.tensor(IDS)))
    whole = parts.head(parts.body(rows, _layout(shape, config.num_hidden_layers)))
    first = load_span(folder, LayerSpan(0, 0), torch.float32, with_embedding=True)
    last = load_span(
        folder, LayerSpan(1, None, has_output=True), torch.float32, with_embedding=False
    )
    split = padded(first.embed(torch.tensor(IDS)))
    for span in (first, last):
        split = span.forward(split, _layout(shape, span.kv_shape.num_layers)).rows_NH
    return whole[: len(IDS)], last.head(split)[: len(IDS)]


def _layout(shape: KVShape, num_layers: int) -> RowLayout:
    """Return the layout of the test's text in a new KV pool for `num_layers` layers."""
    own = KVShape(num_layers=num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    pool = KVPool(
        own, num_pages=2, page_size=TILE_ROWS, dtype=torch.float32, device=torch.device("cpu")
    )
    table = pool.open_table()
    grown = pool.grow(table, len(IDS))
    assert grown, "a pool of two pages"
    return RowLayout(pool, [Extent(table=table, start=0, stop=len(IDS))], TILE_ROWS)
