"""Attention for the draft steps of training, in which every row of a sample drafts as the engine
would from that row.

In the first step a row sees the keys of all rows up to it. In each later step it also sees its own
keys of the second and later steps, but no other row's: in the engine, the positions after this row
hold exactly these keys.
Legend: see the package; n rows of a sample that keep drafting, L all rows of it, m later steps, g =
h / k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fleet.engine.torch.layout import AttentionParams


class UnrolledAttention:
    """Attention over a batch of samples that are concatenated along the rows. Called once for each
    draft step, in order.

    `lengths`: number of rows of each sample. `kept`: indices of each sample's rows that run in the
    steps after the first, ascending, possibly none; the other rows only provide keys and values.
    """

    def __init__(self, lengths: Sequence[int], kept: Sequence[Tensor]) -> None:
        self._lengths, self._kept = list(lengths), list(kept)
        self._first: list[Tensor] = []
        """Keys and values of the first step, of each sample: [L, 2k, d]."""
        self._later: list[Tensor] = []
        """Keys and values of each later step, for the kept rows of all samples: [all n, 2k, d]."""

    def __call__(self, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        if not self._first:
            self._first = list(kv_Nkd.split(self._lengths))
            rows = [torch.arange(length, device=q_Nhd.device) for length in self._lengths]
        else:
            self._later.append(kv_Nkd)
            rows = self._kept
        sizes = [len(rows_n) for rows_n in rows]
        later = [list(step.split(sizes)) for step in self._later]
        outs = [
            _attend(q_nhd, rows[at], self._first[at], [step[at] for step in later], params.scale)
            for at, q_nhd in enumerate(q_Nhd.split(sizes))
            if len(q_nhd)
        ]
        return torch.cat(outs) if outs else q_Nhd.flatten(1)


def _attend(
    q_nhd: Tensor, rows_n: Tensor, first_Lkd: Tensor, later: Sequence[Tensor], scale: float
) -> Tensor:
    num_rows, num_heads, dim = q_nhd.shape
    k_Lkd, v_Lkd = first_Lkd.chunk(2, 1)
    q_kngd = q_nhd.view(num_rows, k_Lkd.shape[1], -1, dim).transpose(0, 1)
    scores_kngL = torch.einsum("kngd,lkd->kngl", q_kngd, k_Lkd) * scale
    seen_nL = torch.arange(len(first_Lkd), device=rows_n.device) <= rows_n[:, None]
    scores = scores_kngL.masked_fill(~seen_nL[:, None], -torch.inf)
    own = torch.stack(list(later), 1) if later else None
    if own is not None:
        k_nmkd, _ = own.chunk(2, 2)
        scores = torch.cat([scores, torch.einsum("kngd,nmkd->kngm", q_kngd, k_nmkd) * scale], -1)
    weights = scores.softmax(-1).to(v_Lkd.dtype)
    out_ngkd = torch.einsum("kngl,lkd->nkgd", weights[..., : len(first_Lkd)], v_Lkd)
    if own is not None:
        _, v_nmkd = own.chunk(2, 2)
        out_ngkd = out_ngkd + torch.einsum(
            "kngm,nmkd->nkgd", weights[..., len(first_Lkd) :], v_nmkd
        )
    return out_ngkd.reshape(num_rows, num_heads * dim)
