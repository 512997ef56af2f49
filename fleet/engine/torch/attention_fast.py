"""Attention for throughput. Short extents (decode positions, with their draft tokens) of all
requests share one call; each longer extent of a prompt has a call of its own. Results vary with the
batch.

Legend: N rows, D short extents, r rows per extent, h query heads, k key/value heads, g = h / k, q =
g x r, d head size, L longest context, P pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.nn.functional as F
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

SHORT_ROWS = 16
"""Largest number of rows of a short extent; short extents are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptRows:
    """A long extent, computed alone: `num_rows` rows of the step from row `first` on, which are the
    last positions of a context of `context` positions.
    """

    first: int
    num_rows: int
    context: int
    pages_P: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict[int | None, Tensor])

    def seen(self, window: int | None) -> Tensor:
        """Return the attention mask, bool [rows, L], cached per `window` so that it is computed
        once per step instead of once per layer.
        """
        if window not in self.masks:
            at_L = torch.arange(self.context, device=self.pages_P.device)
            own_n = at_L[-self.num_rows :, None]
            seen = at_L <= own_n
            self.masks[window] = seen if window is None else seen & (at_L > own_n - window)
        return self.masks[window]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShortRows:
    """Consecutive short extents of `num_rows` rows each, computed together; the first begins at row
    `first` of the step. `contexts`: number of positions up to the end of each extent.

    Shapes: `pages_DP` is flattened; `contexts_D` holds `contexts` as a tensor.
    """

    first: int
    num_rows: int
    contexts: Sequence[int]
    pages_DP: Tensor
    contexts_D: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, Tensor | None])

    @property
    def stop(self) -> int:
        return self.first + len(self.contexts) * self.num_rows

    def seen(self, window: int | None) -> Tensor | None:
        """Return the attention mask, bool [D, rows, L], or None if every row attends to all
        positions.
        """
        longest = max(self.contexts)
        if (
            self.num_rows == 1
            and min(self.contexts) == longest
            and (window is None or longest <= window)
        ):
            return None
        if window not in self.masks:
            at_L = torch.arange(longest, device=self.contexts_D.device)
            own_Dr1 = (
                self.contexts_D[:, None, None]
                + torch.arange(-self.num_rows, 0, device=at_L.device)[:, None]
            )
            seen_DrL = at_L <= own_Dr1
            self.masks[window] = (
                seen_DrL if window is None else seen_DrL & (at_L > own_Dr1 - window)
            )
        return self.masks[window]


class FastLayout:
    """`Layout` of a step in fast numerics. Consecutive extents with the same number of rows, up to
    `SHORT_ROWS`, are computed together.
    """

    def __init__(self, pool: KVPool, extents: Sequence[Extent]) -> None:
        device = pool.data.device
        self._pool = pool
        self.positions = index_tensor(positions_of(extents), device)
        self.rope_lens = rope_lens_of(extents)
        self._slots_N = index_tensor(slots_of(extents, pool), device)
        self._parts = list(_parts(extents, pool))

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        self._pool.slots_of_layer[layer].index_copy_(0, self._slots_N, kv_Nkd)
        outs = [
            self._short(layer, q_Nhd, part, params)
            if isinstance(part, _ShortRows)
            else self._span(layer, q_Nhd, part, params)
            for part in self._parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _short(
        self, layer: int, q_Nhd: Tensor, part: _ShortRows, params: AttentionParams
    ) -> Tensor:
        """Compute attention of short extents of equal length in one call: the rows of an extent
        become further queries of each group of heads.
        """
        _, heads, dim = q_Nhd.shape
        number, rows, groups = len(part.contexts), part.num_rows, self._pool.shape.num_kv_heads
        kv = (
            self._pool.pages_of_layer[layer]
            .index_select(0, part.pages_DP)
            .view(number, -1, 2, groups, dim)
        )
        k_DkLd, v_DkLd = kv.narrow(1, 0, max(part.contexts)).permute(2, 0, 3, 1, 4).unbind(0)
        q_Drkgd = q_Nhd[part.first : part.stop].view(number, rows, groups, -1, dim)
        q_Dkqd = q_Drkgd.permute(0, 2, 3, 1, 4).flatten(2, 3) if rows > 1 else q_Drkgd[:, 0]
        seen_DrL = part.seen(params.window)
        seen = (
            None
            if seen_DrL is None
            else seen_DrL.repeat(1, heads // groups if rows > 1 else 1, 1)[:, None]
        )
        sinks_kq = (
            params.sinks_h.view(groups, -1).repeat_interleave(rows, 1)
            if params.sinks_h is not None
            else None
        )
        out_Dkqd = _attend(q_Dkqd, k_DkLd, v_DkLd, seen, params, sinks_kq)
        return (
            out_Dkqd.view(number, groups, -1, rows, dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(number * rows, heads * dim)
        )

    def _span(
        self, layer: int, q_Nhd: Tensor, span: _PromptRows, params: AttentionParams
    ) -> Tensor:
        q_hnd = q_Nhd[span.first : span.first + span.num_rows].transpose(0, 1)
        kv = (
            self._pool.pages_of_layer[layer]
            .index_select(0, span.pages_P)
            .flatten(0, 1)[: span.context]
        )
        k_kLd, v_kLd = kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1)
        groups = q_hnd.shape[0] // k_kLd.shape[0]
        k_hLd, v_hLd = k_kLd.repeat_interleave(groups, 0), v_kLd.repeat_interleave(groups, 0)
        sinks_h1 = params.sinks_h[:, None] if params.sinks_h is not None else None
        out = _attend(
            q_hnd[None], k_hLd[None], v_hLd[None], span.seen(params.window), params, sinks_h1
        )[0]
        return out.transpose(0, 1).flatten(1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    params: AttentionParams,
    sinks: Tensor | None,
) -> Tensor:
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


def batching_order(extent: Extent) -> int:
    """Return a sort key that places extents next to each other if they are computed together."""
    return min(extent.num_rows, SHORT_ROWS + 1)


def _parts(extents: Sequence[Extent], pool: KVPool) -> Iterator[_ShortRows | _PromptRows]:
    first = 0
    for num_rows, group in groupby(extents, key=batching_order):
        alike = list(group)
        if num_rows <= SHORT_ROWS:
            yield _short_rows(alike, first, pool)
        else:
            yield from _prompt_rows(alike, first, pool)
        first += sum(extent.num_rows for extent in alike)


def _short_rows(extents: Sequence[Extent], first: int, pool: KVPool) -> _ShortRows:
    contexts, device = [extent.stop for extent in extents], pool.data.device
    num_pages = pool.pages_for(max(contexts))
    padded = [_padded(extent.table.pages, num_pages, pool.scratch_page) for extent in extents]
    return _ShortRows(
        first=first,
        num_rows=extents[0].num_rows,
        contexts=contexts,
        pages_DP=index_tensor(padded, device).flatten(),
        contexts_D=index_tensor(contexts, device),
    )


def _prompt_rows(extents: Sequence[Extent], first: int, pool: KVPool) -> Iterator[_PromptRows]:
    for extent in extents:
        pages_P = index_tensor(extent.table.pages[: pool.pages_for(extent.stop)], pool.data.device)
        yield _PromptRows(
            first=first, num_rows=extent.num_rows, context=extent.stop, pages_P=pages_P
        )
        first += extent.num_rows
