"""Where the rows of a step are in the KV pool: where they write keys and values and which positions
they attend to. Knows no model.

Legend: N rows of the step (one row is one position of a request), h query heads, k key/value heads,
d head size, L context length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool, PageTable


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive positions [start, stop) of one request that a step computes. `drafts`: draft
    token ids, which stand at the last of these positions.
    `rope_len`: smallest text length for which the rotary embeddings of the positions are scaled; 0
    if the model does not scale them by length. `is_capture`: True if the hidden states of the
    positions are the answer, for a trainer.
    """

    table: PageTable
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    rope_len: int = 0
    is_capture: bool = False

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Attention parameters of a layer. `window`: number of positions that a row attends to, its own
    included, or None for all; `softcap`: bound of the attention scores, or None.

    `sinks_h`: per head, a score that takes part in the softmax and contributes no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_h: Tensor | None = None


def attention_weights(scores: Tensor, sinks_ab: Tensor | None) -> Tensor:
    """Return the softmax of attention scores and sinks, with the sinks' share left out.

    Shapes: scores [..., a, b, L], sinks broadcastable to [a, b].
    """
    if sinks_ab is None:
        return scores.softmax(-1, dtype=torch.float32)
    sinks = sinks_ab[..., None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]


class Layout(Protocol):
    """Where the rows of one step are in the KV pool, and attention over the keys and values stored
    there.
    """

    @property
    def positions(self) -> Tensor:
        """Position of each row in its request: int64 [N]."""
        ...

    @property
    def rope_lens(self) -> Sequence[int]:
        """For each row, the text length for which its rotary embedding is scaled.

        Empty for models that do not scale rotary embeddings by length.
        """
        ...

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        """Store the rows' keys and values `kv_Nkd` ([N, 2 x k, d], keys first) in a layer of the
        pool, then compute attention from each row. Returns [N, h x d].
        """
        ...


def positions_of(extents: Sequence[Extent], pad_to: int | None = None) -> list[int]:
    positions = [position for extent in extents for position in range(extent.start, extent.stop)]
    return positions + [0] * ((pad_to or 0) - len(positions))


def rope_lens_of(extents: Sequence[Extent], pad_to: int | None = None) -> list[int]:
    """Return `Layout.rope_lens` for extents: per row its position + 1, or `Extent.rope_len` if
    greater; padded to `pad_to` rows.
    """
    lens: list[int] = []
    for extent in extents:
        lens += [max(extent.rope_len, stop) for stop in range(extent.start + 1, extent.stop + 1)]
    return lens + [0] * ((pad_to or 0) - len(lens))


def slots_of(extents: Sequence[Extent], pool: KVPool, pad_to: int | None = None) -> list[int]:
    """Return the KV pool slot of each row, page x page_size + offset; padding up to `pad_to` rows
    uses the scratch page.
    """
    size = pool.page_size
    slots = [
        extent.table.pages[position // size] * size + position % size
        for extent in extents
        for position in range(extent.start, extent.stop)
    ]
    return slots + [pool.scratch_page * size] * ((pad_to or 0) - len(slots))


def index_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
