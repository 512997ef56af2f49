"""A loaded span of a causal model's layers, computed by the model's own code.

All other layers keep their places in the model's own loop, without weights, since some
architectures choose positions or masks by the place. The placeholder before the span inserts hidden
states that another process computed; the placeholder after the span takes the span's result.
Legend: N positions, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import AttentionParams, Layout
from fleet.models.causal_lm.paged import BodyStub, run_layers
from fleet.models.causal_lm.rope import Rotaries, read_scaling
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.torch.model import SpanLayers, SpanRows


class SkippedLayer(nn.Module):
    """Placeholder for a layer of another span. Returns its input, or `inserted` if it is set, and
    keeps its last input as `seen`.
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
    """Placeholder for a part, before the first or after the last layer, that the span does not need
    and whose result is not used.
    """

    def forward(self, given: Tensor, *_args: object, **_: object) -> Tensor:
        return given if given.dim() == 3 else torch.zeros(1, device=given.device)


class SpanLayout:
    """Layout of a step for a KV pool that has only a span's layers. `first`: number of the span's
    first layer, which is layer 0 of the pool.
    """

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
    """A loaded span of a causal model's layers.

    A span that begins at layer 0 includes what runs before the layers, such as learned positions; a
    span with the output head includes the final norm.
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
        """Take over a partly loaded model. `layers`: the model's layers, with a `SkippedLayer` for
        each layer of another span. `kv_shape`: shape of the span's own keys and values.
        `returns_tuple`: the model's layers return a tuple.
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
        """Output of the model's last layer in the current pass."""
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
        """Return the loaded weights by name."""
        own = {
            name: weight
            for name, weight in self.model.named_parameters()
            if not name.startswith(f"{self._name}.")
        }
        return own | {
            f"{self._name}.{name}": weight for name, weight in self._body.named_parameters()
        }

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return the embeddings of token ids: [N] -> [N, H]. The span must have been loaded with
        the embedding.
        """
        return self._embedding(ids_N)

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        """Compute the span's layers: [N, H] -> [N, H], and the final norm if the span has the
        output head.

        `rows_NH`: hidden states that enter the span's first layer.
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
        """Apply what follows the last layer, the final norm: [N, H] -> [N, H]. The span must have
        been loaded with the output head.
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
        """Return the logits [S, V] of final hidden states [S, H]. The span must have been loaded
        with the output head.
        """
        return self.model(inputs_embeds=last_SH[None], use_cache=False).logits[0]

    def _run(self, rows_NH: Tensor, layout: Layout) -> Tensor:
        return run_layers(self._body, self._rotaries, rows_NH, layout)


class NoLayout:
    """Layout for hidden states that pass through no layer; its attention is never called."""

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
