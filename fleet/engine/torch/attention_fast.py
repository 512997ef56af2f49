"""Attention for throughput: all decode rows in one call, each prompt extent in one call. Results vary with the batch.

Legend: N rows, D single rows of a request (decode), h query heads, k key/value heads, g = h / k, d head size,
L longest context, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import AttentionParams, Extent, attention_weights, index_tensor, positions_of, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptRows:
    """Rows [first, first + rows) of the pass: the last `rows` positions of a context."""

    first: int
    num_rows: int
    context: int
    pages_P: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict[int | None, Tensor])

    def seen(self, window: int | None) -> Tensor:
        """Return the attention mask, bool [rows, L], computed once per pass instead of once per layer."""
        if window not in self.masks:
            at_L = torch.arange(self.context, device=self.pages_P.device)
            own_n = at_L[-self.num_rows :, None]
            seen = at_L <= own_n
            self.masks[window] = seen if window is None else seen & (at_L > own_n - window)
        return self.masks[window]


class FastLayout:
    """Layout of a pass; extents of a single row must come first and are computed together."""

    def __init__(self, pool: KVPool, extents: Sequence[Extent]) -> None:
        device = pool.data.device
        self._pool = pool
        self.positions = index_tensor(positions_of(extents), device)
        self._slots_N = index_tensor(slots_of(extents, pool), device)
        single = [extent for extent in extents if extent.num_rows == 1]
        self._num_single = len(single)
        self._contexts = [extent.stop for extent in single]
        if single:
            num_pages = max(pool.pages_for(extent.stop) for extent in single)
            padded = [_padded(extent.table.pages, num_pages, pool.scratch_page) for extent in single]
            self._pages_DP = index_tensor(padded, device).flatten()
            self._contexts_D = index_tensor(self._contexts, device)
        self._spans = list(_spans(extents[self._num_single :], self._num_single, pool))
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        self._pool.slots_of_layer[layer].index_copy_(0, self._slots_N, kv_Nkd)
        outs = [self._single(layer, q_Nhd[: self._num_single], params)] if self._num_single else []
        outs += [self._span(layer, q_Nhd, span, params) for span in self._spans]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _single(self, layer: int, q_Dhd: Tensor, params: AttentionParams) -> Tensor:
        rows, heads, dim = q_Dhd.shape
        longest = max(self._contexts)
        groups = self._pool.shape.num_kv_heads
        kv = self._pool.pages_of_layer[layer].index_select(0, self._pages_DP).view(rows, -1, 2, groups, dim)
        kv_2DkLd = kv.narrow(1, 0, longest).permute(2, 0, 3, 1, 4)
        k_DkLd, v_DkLd = kv_2DkLd.unbind(0)
        q_Dkgd = q_Dhd.view(rows, groups, -1, dim)
        sinks_kg = params.sinks_h.view(groups, -1) if params.sinks_h is not None else None
        out = _attend(q_Dkgd, k_DkLd, v_DkLd, self._single_mask(longest, params.window), params, sinks_kg)
        return out.reshape(rows, heads * dim)

    def _single_mask(self, longest: int, window: int | None) -> Tensor | None:
        if min(self._contexts) == longest and (window is None or longest <= window):
            return None
        if window not in self._masks:
            at_L = torch.arange(longest, device=self._contexts_D.device)
            seen_DL = at_L < self._contexts_D[:, None]
            if window is not None:
                seen_DL &= at_L >= self._contexts_D[:, None] - window
            self._masks[window] = seen_DL[:, None, None]
        return self._masks[window]

    def _span(self, layer: int, q_Nhd: Tensor, span: _PromptRows, params: AttentionParams) -> Tensor:
        q_hnd = q_Nhd[span.first : span.first + span.num_rows].transpose(0, 1)
        kv = self._pool.pages_of_layer[layer].index_select(0, span.pages_P).flatten(0, 1)[: span.context]
        k_kLd, v_kLd = kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1)
        groups = q_hnd.shape[0] // k_kLd.shape[0]
        k_hLd, v_hLd = k_kLd.repeat_interleave(groups, 0), v_kLd.repeat_interleave(groups, 0)
        sinks_h1 = params.sinks_h[:, None] if params.sinks_h is not None else None
        out = _attend(q_hnd[None], k_hLd[None], v_hLd[None], span.seen(params.window), params, sinks_h1)[0]
        return out.transpose(0, 1).flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    if params.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=params.scale)
    scores = q @ k.transpose(-1, -2) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return attention_weights(scores, sinks).to(v.dtype) @ v


def _padded(pages: list[int], num_pages: int, scratch: int) -> list[int]:
    return pages[:num_pages] + [scratch] * (num_pages - len(pages))


def _spans(extents: Sequence[Extent], first: int, pool: KVPool) -> list[_PromptRows]:
    spans: list[_PromptRows] = []
    for extent in extents:
        pages = extent.table.pages[: pool.pages_for(extent.stop)]
        pages_P = index_tensor(pages, pool.data.device)
        spans.append(_PromptRows(first=first, num_rows=extent.num_rows, context=extent.stop, pages_P=pages_P))
        first += extent.num_rows
    return spans
