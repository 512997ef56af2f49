"""Forward passes of a draft head, token by token, at positions (layouts) that the caller chooses.
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
    """Run the head on rows that the target has computed, which writes their keys and values; return
    the head's hidden states [N, H].

    `taps_NT`: the target's hidden states. `embeddings_NH`: embeddings of the tokens after the rows'
    positions. `layout`: positions of the rows. `layer`: layer of the head in the KV pool.
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
    """Draft one token for each request, and one more per layout; return the target's ids, int64 [S,
    drafts].

    `hidden_SH`: last hidden states from `read_taps`. `layouts`: the following positions in order,
    with one row of each request per layout. `layer`: layer of the head in the KV pool. `embed`:
    maps ids to embeddings. The rows' keys and values stay in the pool until `read_taps` of the same
    positions overwrites them.
    """
    drafts = [head.draft(hidden_SH)]
    for layout in layouts:
        hidden_SH = head(
            embed(drafts[-1]), hidden_SH, layout.positions, partial(layout.attend, layer)
        )
        drafts.append(head.draft(hidden_SH))
    return torch.stack(drafts, 1)
