"""Attention whose result for a row does not depend on the other rows of the step; prompt and decode
use the same code.

The kernels see a row's context padded to a length that depends on the context alone, and a row is
an item of its own in a batch, whose size does not affect an item (measured on CPU in float32;
tests/unit/test_lm_attention.py). Rows with equal padded lengths share a call.
Legend: N rows, h query heads, k key/value heads, g = h / k, d head size, R rows of a call, L their
padded context length.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import (
    AttentionParams,
    Extent,
    attention_weights,
    index_tensor,
    positions_of,
    rope_lens_of,
    slots_of,
)

UNIT = 16
"""Contexts are padded to a multiple of this number of positions, whatever the page size."""
CALL_BYTES = 2 * 2**20
"""Largest size of the keys and values of one call in one layer. Larger calls do not stay in the CPU
caches between their kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """Context of one row: row `row` of the tile attends to positions [first, stop). `slots`: KV
    pool slots of the context, padded at both ends to multiples of `UNIT`.
    """

    row: int
    first: int
    stop: int
    slots: NDArray[np.int64]

    @property
    def hidden(self) -> NDArray[np.bool_]:
        at = np.arange(self.first // UNIT * UNIT, self.first // UNIT * UNIT + len(self.slots))
        return (at < self.first) | (at >= self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AlikeRows:
    """Rows with contexts of equal padded length, computed in one call. `hidden`: mask of the
    padding, bool [R, 1, 1, L], or None if every row attends to all positions.

    `vectors_2RkL`, flattened: indices of the rows' keys, then of their values, among all vectors of
    the layer in the pool.
    """

    rows_R: Tensor
    vectors_2RkL: Tensor
    hidden: Tensor | None


class RowLayout:
    """`Layout` of a tile of at most `num_rows` rows, padded to exactly that number; padding rows
    return zeros.
    """

    def __init__(self, pool: KVPool, extents: Sequence[Extent], num_rows: int) -> None:
        device = pool.data.device
        self._pool, self._extents = pool, extents
        self.positions = index_tensor(positions_of(extents, num_rows), device)
        self.rope_lens = rope_lens_of(extents, num_rows)
        self._slots_N = index_tensor(slots_of(extents, pool, num_rows), device)
        self._groups: dict[int | None, Sequence[_AlikeRows]] = {}

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        slots = self._pool.slots_of_layer[layer]
        slots.index_copy_(0, self._slots_N, kv_Nkd)
        num_rows, num_heads, dim = q_Nhd.shape
        groups = self._pool.shape.num_kv_heads
        out_Nkgd = q_Nhd.new_zeros(num_rows, groups, num_heads // groups, dim)
        q_Nkgd, vectors = q_Nhd.reshape(out_Nkgd.shape), slots.view(-1, dim)
        for alike in self._groups_of(params.window):
            k_RkLd, v_RkLd = vectors.index_select(0, alike.vectors_2RkL).view(
                2, len(alike.rows_R), groups, -1, dim
            )
            q_Rkgd = q_Nkgd.index_select(0, alike.rows_R)
            out_Nkgd.index_copy_(
                0, alike.rows_R, _attend(q_Rkgd, k_RkLd, v_RkLd, alike.hidden, params)
            )
        return out_Nkgd.flatten(1)

    def _groups_of(self, window: int | None) -> Sequence[_AlikeRows]:
        """Return the rows in groups of equal padded context length for layers with this attention
        window; the result is cached for all layers with the same window.
        """
        if window not in self._groups:
            self._groups[window] = list(_groups(self._contexts(window), self._pool))
        return self._groups[window]

    def _contexts(self, window: int | None) -> Iterator[_Context]:
        row = 0
        for extent in self._extents:
            slots = _padded_slots(extent, self._pool)
            for stop in range(extent.start + 1, extent.stop + 1):
                first = 0 if window is None else max(0, stop - window)
                yield _Context(
                    row=row,
                    first=first,
                    stop=stop,
                    slots=slots[first // UNIT * UNIT : -(-stop // UNIT) * UNIT],
                )
                row += 1


def _padded_slots(extent: Extent, pool: KVPool) -> NDArray[np.int64]:
    """Return the slots of an extent's positions from 0 on, padded to a multiple of `UNIT`;
    positions beyond the last page repeat the last slot.
    """
    pages = np.array(extent.table.pages[: pool.pages_for(extent.stop)], np.int64)
    slots = (pages[:, None] * pool.page_size + np.arange(pool.page_size)).ravel()
    missing = max(0, -(-extent.stop // UNIT) * UNIT - len(slots))
    return np.pad(slots, (0, missing), mode="edge")


def _groups(contexts: Iterator[_Context], pool: KVPool) -> Iterator[_AlikeRows]:
    """Divide rows into groups of equal padded context length, each of at most `CALL_BYTES`."""
    alike: dict[int, list[_Context]] = defaultdict(list)
    for context in contexts:
        alike[len(context.slots)].append(context)
    position_bytes = pool.slots_of_layer[0][0].nbytes
    for length, rows in alike.items():
        most = max(1, CALL_BYTES // (length * position_bytes))
        for first in range(0, len(rows), most):
            yield _group(rows[first : first + most], pool.shape.num_kv_heads, pool.data.device)


def _group(rows: Sequence[_Context], num_kv_heads: int, device: torch.device) -> _AlikeRows:
    hidden_RL, slots_RL = (
        np.stack(parts) for parts in zip(*((each.hidden, each.slots) for each in rows), strict=True)
    )
    vectors_2RkL = 2 * num_kv_heads * slots_RL[:, None] + np.arange(2 * num_kv_heads).reshape(
        2, 1, num_kv_heads, 1
    )
    return _AlikeRows(
        rows_R=index_tensor([each.row for each in rows], device),
        vectors_2RkL=torch.from_numpy(vectors_2RkL.ravel()).to(device),
        hidden=torch.from_numpy(hidden_RL)[:, None, None].to(device) if hidden_RL.any() else None,
    )


def _attend(
    q_Rkgd: Tensor, k_RkLd: Tensor, v_RkLd: Tensor, hidden: Tensor | None, params: AttentionParams
) -> Tensor:
    scores_RkgL = q_Rkgd @ k_RkLd.transpose(-1, -2) * params.scale
    if params.softcap is not None:
        # Row by row: in a larger tensor other elements would be those that a vector of the
        # processor does not fill.
        scores_RkgL = torch.stack(
            [torch.tanh(row / params.softcap) * params.softcap for row in scores_RkgL]
        )
    if hidden is not None:
        scores_RkgL = scores_RkgL.masked_fill(hidden, -torch.inf)
    sinks_kg = params.sinks_h.view(scores_RkgL.shape[1:3]) if params.sinks_h is not None else None
    return attention_weights(scores_RkgL, sinks_kg) @ v_RkLd
