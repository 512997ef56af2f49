"""A span of a causal model's layers: what it computes, by the model's own code.

The other layers keep their places in the model's own loop, without weights, since some
architectures choose positions or masks by the place. The layer before the span inserts the rows
that another process computed, the one after it takes the span's rows out.
Legend: N rows, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import AttentionParams, Layout
from fleet.models.causal_lm.paged import LAYOUT, BodyStub
from fleet.models.causal_lm.rope import Rotaries, read_scaling
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.torch.model import SpanLayers, SpanRows


class SkippedLayer(nn.Module):
    """A layer of another span: returns its input, or `inserted` if it is set, and records its input
    as `seen`.
    """

    def __init__(self, layer: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__()
        # The loop reads attributes of a layer, such as its kind of attention.
        self.__dict__ |= {
            name: value
            for name, value in vars(layer).items()
            if not name.startswith("_") and name != "training"
        }
        self._returns_tuple = returns_tuple
        self.inserted: Tensor | None = None
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor, *_args: object, **_: object) -> Tensor | tuple[Tensor]:
        self.seen = hidden
        result = hidden if self.inserted is None else self.inserted
        return (result,) if self._returns_tuple else result


class Unloaded(nn.Module):
    """A part before the first or after the last layer that the span does not need: its result is
    not used.
    """

    def forward(self, given: Tensor, *_args: object, **_: object) -> Tensor:
        return given if given.dim() == 3 else torch.zeros(1, device=given.device)


class SpanLayout:
    """A pass's layout for a pool that holds a span's layers only, the first of them as layer 0."""

    def __init__(self, layout: Layout, first: int) -> None:
        self._layout, self._first = layout, first

    @property
    def positions(self) -> Tensor:
        return self._layout.positions

    @property
    def rope_lens(self) -> Sequence[int]:
        return self._layout.rope_lens

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        return self._layout.attend(layer - self._first, q_Nhd, kv_Nkd, params)


class SpanModel(SpanLayers):
    """The loaded span, and what it computes.

    The span from layer 0 has what runs before it, learned positions for example, the one with the
    output head the final norm too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: nn.ModuleList,
        span: LayerSpan,
        kv_shape: KVShape,
        *,
        returns_tuple: bool,
    ) -> None:
        """`layers`: the model's layers, with a `SkippedLayer` for each layer of another span.
        `kv_shape`: shape of the span's own keys and values.
        """
        self.model = model
        self._span = span
        self._kv_shape = kv_shape
        self._name, self._stub = model.base_model_prefix, BodyStub()
        self._body = cast(nn.Module, getattr(model, self._name))
        self._rotaries = Rotaries(self._body, read_scaling(model.config.get_text_config()))
        self._layers = layers
        self._own = list(layers)
        self._skipped = [
            layer
            if isinstance(layer, SkippedLayer)
            else SkippedLayer(layer, returns_tuple=returns_tuple)
            for layer in self._own
        ]
        self._embedding = model.get_input_embeddings()
        self._left: Tensor | None = None
        """The rows that left the model's last layer."""
        self._own[-1].register_forward_hook(self._note_left)
        setattr(model, self._name, self._stub)

    def _note_left(
        self, _layer: nn.Module, _given: object, result: Tensor | tuple[Tensor, ...]
    ) -> None:
        self._left = result if isinstance(result, Tensor) else result[0]

    @property
    def span(self) -> LayerSpan:
        return self._span

    @property
    def kv_shape(self) -> KVShape:
        return self._kv_shape

    def _embedding_width(self) -> int:
        return cast(nn.Embedding, self._embedding).weight.shape[1]

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that are loaded, by their names in the body or in the model around
        it.
        """
        own = {
            name: weight
            for name, weight in self.model.named_parameters()
            if not name.startswith(f"{self._name}.")
        }
        return own | {
            f"{self._name}.{name}": weight for name, weight in self._body.named_parameters()
        }

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return embeddings [N, H]; only of a span that was loaded with them."""
        return self._embedding(ids_N)

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        """Compute the span's layers: [N, H] -> [N, H]. With the output head the final norm follows.

        `rows_NH`: the rows after the layer before, or embeddings.
        """
        first, final = self._span.first, self._span.final
        before = self._own[first - 1] if first else None
        with _inserting(before, rows_NH):
            done = self._run(rows_NH, SpanLayout(layout, first))
        following = self._own[final + 1] if final + 1 < len(self._own) else None
        if following is None and self._span.has_output:
            return SpanRows(rows_NH=done)
        left = cast(SkippedLayer, following).seen if following is not None else self._left
        assert left is not None
        return SpanRows(rows_NH=left[0])

    def finish(self, rows_NH: Tensor) -> Tensor:
        """Return what follows the last layer, the final norm: [N, H] -> [N, H]; only of a span that
        was loaded with it.
        """
        for number, layer in enumerate(self._skipped):
            self._layers[number] = layer
        try:
            with _inserting(self._skipped[-1], rows_NH):
                unused = rows_NH.new_zeros(len(rows_NH), self._embedding_width())
                return self._run(unused, NoLayout(rows_NH))
        finally:
            for number, layer in enumerate(self._own):
                self._layers[number] = layer

    def head(self, last_SH: Tensor) -> Tensor:
        """Return logits [S, V]; only of a span with the output head."""
        return self.model(inputs_embeds=last_SH[None], use_cache=False).logits[0]

    def _run(self, rows_NH: Tensor, layout: Layout) -> Tensor:
        positions = layout.positions[None]
        with self._rotaries.scaled_for(layout):
            done = self._body(
                inputs_embeds=rows_NH[None],
                position_ids=positions,
                use_cache=False,
                **{LAYOUT: layout},
            )
        return done.last_hidden_state[0]


class NoLayout:
    """The layout of rows that go through no layer."""

    rope_lens = ()

    def __init__(self, rows_NH: Tensor) -> None:
        self.positions = torch.zeros(len(rows_NH), dtype=torch.int64, device=rows_NH.device)

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        raise AssertionError(f"layer {layer} runs after the last one")


@contextmanager
def _inserting(layer: nn.Module | None, rows_NH: Tensor) -> Iterator[None]:
    if layer is None:
        yield
        return
    skipped = cast(SkippedLayer, layer)
    skipped.inserted = rows_NH[None]
    try:
        yield
    finally:
        skipped.inserted = None
