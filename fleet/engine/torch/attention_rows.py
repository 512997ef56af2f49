"""Attention whose result for a row does not depend on the rest of the pass: row by row, one path for prompt and decode.

Every shape depends on the row's own context length only, which makes it slow.
Legend: N rows, h query heads, k key/value heads, g = h / k, d head size, L the row's context length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import AttentionParams, Extent, attention_weights, index_tensor, positions_of, slots_of


class RowLayout:
    """A tile of at most `num_rows` rows, padded to exactly that many; padding rows return zeros."""

    def __init__(self, pool: KVPool, extents: Sequence[Extent], num_rows: int) -> None:
        device = pool.data.device
        self._pool = pool
        self.positions = index_tensor(positions_of(extents, num_rows), device)
        self._slots_N = index_tensor(slots_of(extents, pool, num_rows), device)
        self._contexts: list[tuple[int, Tensor]] = []
        for extent in extents:
            pages = index_tensor(extent.table.pages, device)
            self._contexts += [
                (position + 1, pages[: pool.pages_for(position + 1)]) for position in range(extent.start, extent.stop)
            ]

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        self._pool.slots_of_layer[layer].index_copy_(0, self._slots_N, kv_Nkd)
        num_rows, num_heads, dim = q_Nhd.shape
        groups = self._pool.shape.num_kv_heads
        out_Nkgd = q_Nhd.new_zeros(num_rows, groups, num_heads // groups, dim)
        q_Nkgd = q_Nhd.reshape(out_Nkgd.shape)
        for row, (context, pages) in enumerate(self._contexts):
            kv = self._pool.pages_of_layer[layer][pages].flatten(0, 1)[_first_position(context, params.window) : context]
            k_kLd, v_kLd = kv[:, 0].transpose(0, 1).contiguous(), kv[:, 1].transpose(0, 1).contiguous()
            out_Nkgd[row] = _one_row(q_Nkgd[row].contiguous(), k_kLd, v_kLd, params)
        return out_Nkgd.flatten(1)


def _one_row(q_kgd: Tensor, k_kLd: Tensor, v_kLd: Tensor, params: AttentionParams) -> Tensor:
    scores_kgL = torch.bmm(q_kgd, k_kLd.transpose(1, 2)) * params.scale
    if params.softcap is not None:
        scores_kgL = torch.tanh(scores_kgL / params.softcap) * params.softcap
    sinks_kg = params.sinks_h.view(scores_kgL.shape[:2]) if params.sinks_h is not None else None
    return torch.bmm(attention_weights(scores_kgL, sinks_kg), v_kLd)


def _first_position(context: int, window: int | None) -> int:
    return 0 if window is None else max(0, context - window)
