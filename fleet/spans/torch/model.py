"""A span of a model's layers in one process, and its computation of a step. Knows no connection.

Legend: N rows of a step, H hidden size, S rows sampled from, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent, Layout
from fleet.engine.torch.passes import tiles
from fleet.engine.torch.rows import joined
from fleet.engine.torch.tiles import TILE_ROWS, in_tiles, padded
from fleet.spans.protocol.layers import LayerSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRows:
    """Hidden states that a span computed for a step.

    `rows_NH`: output of the span's last layer, after the final norm if the span has the output
    head. `tapped_NH`: hidden states that enter the tapped layer; None if the span does not have
    this layer.
    """

    rows_NH: Tensor
    tapped_NH: Tensor | None = None


class SpanLayers(Protocol):
    """The layers of a span with their weights, as model families implement them.

    `kv_shape`: shape of these layers' keys and values; in the KV pool they are numbered from 0.
    """

    @property
    def span(self) -> LayerSpan: ...

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def has_tapped_layer(self) -> bool:
        """True if the span contains the layer whose input is tapped."""
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """Return the loaded weights by name; a shared weight appears under each of its names."""
        ...

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        """Compute the span's layers. `rows_NH`: output of the previous layer, or embeddings."""
        ...

    def finish(self, rows_NH: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output. Only for spans with the output head."""
        ...

    def head(self, last_SH: Tensor) -> Tensor:
        """Return logits [S, V]. Only for spans with the output head."""
        ...


class SpanComputer:
    """Computes steps with a span's layers: all rows together, or in fixed tiles (invariant
    numerics).
    """

    def __init__(self, layers: SpanLayers, pool: KVPool, *, tiled: bool) -> None:
        self.layers = layers
        self.pool = pool
        self._tiled = tiled

    def run(self, rows_NH: Tensor, extents: Sequence[Extent]) -> SpanRows:
        if not self._tiled:
            return self.layers.forward(rows_NH, FastLayout(self.pool, extents))
        groups = tiles([(None, extent) for extent in extents])
        parts = zip(rows_NH.split(TILE_ROWS), groups, strict=True)
        done = [self._tile(tile_NH, [extent for _, extent in group]) for tile_NH, group in parts]
        taps = [part.tapped_NH for part in done if part.tapped_NH is not None]
        return SpanRows(
            rows_NH=joined([part.rows_NH for part in done]),
            tapped_NH=joined(taps) if taps else None,
        )

    def _tile(self, tile_NH: Tensor, extents: Sequence[Extent]) -> SpanRows:
        used = len(tile_NH)
        done = self.layers.forward(padded(tile_NH), RowLayout(self.pool, extents, TILE_ROWS))
        tapped_NH = done.tapped_NH
        return SpanRows(
            rows_NH=done.rows_NH[:used], tapped_NH=None if tapped_NH is None else tapped_NH[:used]
        )

    def finish(self, last_SH: Tensor) -> Tensor:
        """Apply the final norm: [S, H] -> [S, H]."""
        return in_tiles(self.layers.finish, last_SH) if self._tiled else self.layers.finish(last_SH)

    def head(self, last_SH: Tensor) -> Tensor:
        """Return logits: [S, H] -> [S, V]."""
        return in_tiles(self.layers.head, last_SH) if self._tiled else self.layers.head(last_SH)


def last_rows(rows_NH: Tensor, extents: Sequence[Extent], wanted: Sequence[bool]) -> Tensor:
    """Return the hidden state of each extent's last position, for extents with `wanted` True: [S,
    H].
    """
    rows: list[int] = []
    stop = 0
    for extent, is_wanted in zip(extents, wanted, strict=True):
        stop += extent.num_rows
        rows += [stop - 1] if is_wanted else []
    return rows_NH[torch.tensor(rows, dtype=torch.int64, device=rows_NH.device)]
