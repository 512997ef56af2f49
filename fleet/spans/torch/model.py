"""A span of a model's layers as one process holds it, and its computation for a pass. Knows no
connection.

Legend: N rows of a pass, H hidden size, S rows drawn from, V vocabulary.
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
    """`rows_NH`: after the span's last layer, normed if the span has the output head. `tapped_NH`:
    those that enter the tapped layer, if the span has it.
    """

    rows_NH: Tensor
    tapped_NH: Tensor | None = None


class SpanLayers(Protocol):
    """A span of a model's layers. `kv_shape`: shape of the keys and values of these layers, which
    are numbered from 0 in the pool.
    """

    @property
    def span(self) -> LayerSpan: ...

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def has_tapped_layer(self) -> bool:
        """True if the model taps one of these layers."""
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """Return the loaded weights by name; a weight may have several."""
        ...

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        """Compute the layers. `rows_NH`: the rows after the layer before, or embeddings."""
        ...

    def finish(self, rows_NH: Tensor) -> Tensor:
        """Return the final norm of rows after the last layer; only where the head is."""
        ...

    def head(self, last_SH: Tensor) -> Tensor:
        """Return logits [S, V]; only where the head is."""
        ...


class SpanComputer:
    """Computes passes of a span: all rows together, or in fixed tiles (numerics invariant)."""

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
        """Return the final norm of rows: [S, H]."""
        return in_tiles(self.layers.finish, last_SH) if self._tiled else self.layers.finish(last_SH)

    def head(self, last_SH: Tensor) -> Tensor:
        """Return logits [S, V]."""
        return in_tiles(self.layers.head, last_SH) if self._tiled else self.layers.head(last_SH)


def last_rows(rows_NH: Tensor, extents: Sequence[Extent], wanted: Sequence[bool]) -> Tensor:
    """Return the rows of the last positions of the extents that are wanted: [S, H]."""
    rows: list[int] = []
    stop = 0
    for extent, is_wanted in zip(extents, wanted, strict=True):
        stop += extent.num_rows
        rows += [stop - 1] if is_wanted else []
    return rows_NH[torch.tensor(rows, dtype=torch.int64, device=rows_NH.device)]
