"""Positions of a pass's rows in the KV pool, where they write keys and values and what they attend
to. Knows no model.

Legend: N rows of the pass (positions of any requests), h query heads, k key/value heads, d head
size, L context length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool, PageTable


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Positions [start, stop) of one request, consecutive rows of the pass. `drafts`: token ids of
    the last rows, which are guesses about the answer.
    `rope_len`: length of the text by which its rows' rotary embeddings are scaled at least, if the
    model scales them by length.
    """

    table: PageTable
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    rope_len: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """A layer's attention parameters. `window` counts positions, the row's own included; `softcap`
    bounds scores.

    `sinks_h`: per head, a score that takes part in the softmax and contributes no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_h: Tensor | None = None


def attention_weights(scores: Tensor, sinks_ab: Tensor | None) -> Tensor:
    """Return the softmax of scores, without the share of the sinks.

    Shapes: scores [..., a, b, L], sinks broadcastable to [a, b].
    """
    if sinks_ab is None:
        return scores.softmax(-1, dtype=torch.float32)
    sinks = sinks_ab[..., None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]


class Layout(Protocol):
    """The places of a step's rows in the KV pool, and attention over the rows stored there."""

    @property
    def positions(self) -> Tensor:
        """int64 [N]."""
        ...

    @property
    def rope_lens(self) -> Sequence[int]:
        """For each row, the length of the text by which its rotary embedding is scaled.

        Empty in layouts of models that do not scale them by length.
        """
        ...

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        """Store the rows' keys and values ([N, 2 x k, d], keys first), then attend from each row.
        Returns [N, h x d].
        """
        ...


def positions_of(extents: Sequence[Extent], pad_to: int | None = None) -> list[int]:
    positions = [position for extent in extents for position in range(extent.start, extent.stop)]
    return positions + [0] * ((pad_to or 0) - len(positions))


def rope_lens_of(extents: Sequence[Extent], pad_to: int | None = None) -> list[int]:
    """Return `Layout.rope_lens`: the text up to each row, or more of it by `Extent.rope_len`."""
    lens: list[int] = []
    for extent in extents:
        lens += [max(extent.rope_len, stop) for stop in range(extent.start + 1, extent.stop + 1)]
    return lens + [0] * ((pad_to or 0) - len(lens))


def slots_of(extents: Sequence[Extent], pool: KVPool, pad_to: int | None = None) -> list[int]:
    """Return each row's slot, page x page_size + offset; padding uses the scratch page."""
    size = pool.page_size
    slots = [
        extent.table.pages[position // size] * size + position % size
        for extent in extents
        for position in range(extent.start, extent.stop)
    ]
    return slots + [pool.scratch_page * size] * ((pad_to or 0) - len(slots))


def index_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
