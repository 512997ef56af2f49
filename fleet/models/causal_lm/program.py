"""A causal language model of `transformers` as a program of the batch loop: takes prompt ids,
produces answer ids.

Legend: N positions of a step, H hidden size, S requests that sample a token, V vocabulary.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig

from fleet.core.errors import ConfigError
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.answer import AnsweringTask, TokenAnswer, history_of
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.prefix import Prefix, joined_keys
from fleet.engine.torch.program import Forwarded
from fleet.models.answering import AnsweringProgram
from fleet.models.causal_lm.load import load_model, read_config, refusing
from fleet.models.causal_lm.norms import fuse_norms
from fleet.models.causal_lm.parts import Parts
from fleet.models.causal_lm.probe import probe
from fleet.models.causal_lm.quantized import quantize, widen_products
from fleet.models.causal_lm.rope import read_scaling
from fleet.models.causal_lm.span_load import load_span
from fleet.spans.protocol.layers import LayerSpan

SALT = zlib.crc32(b"lm")
ID_BITS = 32
"""Bits of a token id in the prefix cache key of a position; the higher bits have the length by
which its rotary embedding is scaled.
"""


class CausalTask(AnsweringTask):
    """State of one request in a causal language model: embeddings of its prompt and answer so far,
    and its sampling.
    """

    def __init__(self, program: "CausalProgram", request: EngineRequest) -> None:
        super().__init__()
        self._program, self._request = program, request
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """Take the whole prompt, which arrives as one input: `ids` int32 [N]."""
        self._ids = ids = np.asarray(piece.arrays["ids"], np.int64)
        known = np.concatenate([ids, history_of(self._request)])
        self._program.check_ids(known)
        self._rows.extend(self._program.embed(known))
        self.answer = TokenAnswer(self._request, ids.tolist(), self._program.end_ids, SALT)
        return ()

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows.cut(start, stop)

    def on_computed(
        self, start: int, stop: int, tapped_NH: Tensor | None
    ) -> Sequence[EngineOutput]:
        return self.answer.take_replayed() if self.answer is not None else ()

    @property
    def most_drafts(self) -> int:
        """Most draft tokens for the next step. Limited so that no draft lies beyond the length at
        which earlier positions are recomputed with other rotary frequencies.
        """
        rope, most = self._program.rope, super().most_drafts
        left = rope.num_left(len(self._ids), self.num_rows) if rope is not None else None
        return most if left is None else min(most, left)

    def rope_len(self, num_rows: int) -> int:
        rope = self._program.rope
        return rope.least_len(len(self._ids), num_rows) if rope is not None else 0

    def prefix(self) -> Prefix:
        """Return the prefix cache keys of prompt and answer. Positions have equal keys if their
        ids, and the lengths that scale their rotary embeddings, are equal.
        """
        keys, rope = joined_keys([self._ids, self.drawn_ids])[: self.num_rows], self._program.rope
        if rope is None:
            return Prefix(keys=keys)
        least = self.rope_len(self.num_rows)
        lens = [rope.scaled_len(max(least, at + 1)) for at in range(len(keys))]
        return Prefix(keys=keys + (np.array(lens, np.int64) << ID_BITS))


def check_experts(config: PretrainedConfig, *, tiled: bool) -> None:
    """Refuse mixture-of-experts models if numerics are invariant (`tiled`). Raises: ConfigError."""
    if tiled and (getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)):
        kind = config.model_type
        raise ConfigError(
            f"numerics: invariant is not available for {kind}, which has experts; use fast",
            param="numerics",
        )


class CausalProgram(AnsweringProgram):
    """Base class of causal language model programs: for a process with all layers, and for an
    anchor with a span of layers.
    """

    tapped_width = 0

    def __init__(
        self,
        config: PretrainedConfig,
        end_ids: frozenset[int],
        embed_tokens: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        *,
        device: torch.device,
        tiled: bool,
    ) -> None:
        num_ids = int(config.vocab_size)
        super().__init__(
            end_ids, embed_tokens, head, num_ids=num_ids, device=device, one_by_one=tiled
        )
        self.rope = read_scaling(config)

    def open(self, request: EngineRequest) -> CausalTask:
        return CausalTask(self, request)


class CausalLM(CausalProgram):
    """Program of a causal language model with all layers in this process. Supports any architecture
    whose layers all use the attention interface of `transformers`.

    `tiled`: numerics are invariant. `weight_bits`: 8 or 4 for linear layers with rounded
    weights, 0 for weights in `dtype`.
    Raises: ConfigError for other architectures, and for mixture-of-experts models if `tiled`.
    """

    def __init__(
        self,
        folder: Path,
        end_ids: frozenset[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        tiled: bool,
        weight_bits: int = 0,
    ) -> None:
        config, self._folder = read_config(folder), folder
        kind = config.model_type
        check_experts(config, tiled=tiled)
        model = load_model(folder, kind, dtype)
        with refusing(
            folder,
            f"{kind} cannot be put on {device}",
            "give the stage another device, or a smaller checkpoint",
        ):
            cast(nn.Module, model).to(device)
            fuse_norms(model)
        if weight_bits:
            quantize(model, weight_bits)
        elif dtype == torch.bfloat16 and device.type == "cpu":
            widen_products(model)
        with refusing(folder, f"{kind} cannot be served"):
            self._parts = Parts(model)
            self.kv_shape = probe(config, self._parts, device)
        super().__init__(
            config, end_ids, self._parts.embed, self._parts.head, device=device, tiled=tiled
        )

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[CausalTask]) -> Forwarded:
        return Forwarded(
            last_NH=self._parts.body(rows_NH, layout), features_NT=self._parts.features()
        )

    def read_features(self, layers: Sequence[int]) -> None:
        with refusing(self._folder, "a draft head cannot read its layers"):
            self._parts.read_features(layers)


class CausalAnchor(CausalProgram):
    """Program of a causal language model in an anchor, which has a span of the layers; span workers
    have the rest. `with_head`: the anchor has the output head even if its span ends before the
    head.

    Raises: as `load_span`.
    """

    taps_elsewhere = False

    def __init__(
        self,
        folder: Path,
        end_ids: frozenset[int],
        span: LayerSpan,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tiled: bool,
        with_head: bool,
    ) -> None:
        config = read_config(folder)
        check_experts(config, tiled=tiled)
        self.layers = load_span(
            folder, span, dtype, with_embedding=True, with_head=with_head, device=device
        )
        self.kv_shape, self.num_layers = self.layers.kv_shape, int(config.num_hidden_layers)
        super().__init__(
            config, end_ids, self.layers.embed, self.layers.head, device=device, tiled=tiled
        )

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[CausalTask]) -> Forwarded:
        raise AssertionError("the anchor has a span of the layers only")
