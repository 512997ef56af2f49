"""Tiles of a fixed number of rows: the shape at which matrix kernels give a row the same bits at
every place in the tile.

Measured on CPU in float32: in a 16-row tile a row's bits depend neither on its place nor on its
neighbours, at one thread and at two; with fewer rows they may. Legend: N rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILE_ROWS = 16


def padded(rows_N: Tensor) -> Tensor:
    """Return the rows with zero rows appended, up to `TILE_ROWS` rows."""
    missing = TILE_ROWS - len(rows_N)
    return (
        rows_N
        if missing == 0
        else torch.cat([rows_N, rows_N.new_zeros(missing, *rows_N.shape[1:])])
    )


def in_tiles(function: Callable[[Tensor], Tensor], rows_N: Tensor) -> Tensor:
    """Return the result of a row-wise function, applied to tiles of `TILE_ROWS` rows; the last tile
    is padded.
    """
    parts = [function(padded(tile)) for tile in rows_N.split(TILE_ROWS)]
    return torch.cat(parts)[: len(rows_N)]
