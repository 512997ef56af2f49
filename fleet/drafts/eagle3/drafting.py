"""Drafting step by step: the order of the head's calls, over layouts that the caller has made.
Knows no requests.

Legend: see the package.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fleet.drafts.eagle3.head import Eagle3Head
from fleet.engine.torch.layout import Layout


@torch.inference_mode()
def read_taps(
    head: Eagle3Head, embeddings_NH: Tensor, taps_NT: Tensor, layout: Layout, layer: int
) -> Tensor:
    """Compute rows from the target's taps, which writes their keys and values: returns the hidden
    states [N, H].

    `layout`: positions of the rows. `embeddings_NH`: embeddings of the tokens after these
    positions. `layer`: layer of the head in the KV pool.
    """
    return head(embeddings_NH, head.fuse(taps_NT), layout.positions, partial(layout.attend, layer))


@torch.inference_mode()
def draft_tokens(
    head: Eagle3Head,
    hidden_SH: Tensor,
    layouts: Iterable[Layout],
    layer: int,
    embed: Callable[[Tensor], Tensor],
) -> Tensor:
    """Draft one token of each request, and one more for each layout: returns the target's ids,
    int64 [S, drafts].

    `hidden_SH`: last hidden states from `read_taps`. `layouts`: the positions after them in order,
    one row of each request per layout. Their keys and values stay in the pool until `read_taps` of
    the same positions overwrites them.
    """
    drafts = [head.draft(hidden_SH)]
    for layout in layouts:
        hidden_SH = head(
            embed(drafts[-1]), hidden_SH, layout.positions, partial(layout.attend, layer)
        )
        drafts.append(head.draft(hidden_SH))
    return torch.stack(drafts, 1)
