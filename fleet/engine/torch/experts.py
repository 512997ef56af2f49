"""Mixture-of-experts products: grouped by expert (fast), or every chosen expert over the whole tile (invariant).

Legend: N rows, H hidden size, I expert width, E experts, k experts a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Shapes: `gate_up` [E, 2 x I, H], `down` [E, H, I]."""

    gate_up: Tensor
    down: Tensor


Experts = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]
"""The weighted sum of each row's experts: (rows [N, H], expert ids [N, k], weights [N, k], matrices) -> [N, H]."""


def _expert(rows_nH: Tensor, expert: int, matrices: ExpertWeights) -> Tensor:
    gate, up = F.linear(rows_nH, matrices.gate_up[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, matrices.down[expert])


def grouped_experts(rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: ExpertWeights) -> Tensor:
    """Run each chosen expert once, over its rows only."""
    num_rows, k = ids_Nk.shape
    if num_rows == 1:
        outs = torch.cat([_expert(rows_NH, expert, matrices) for expert in ids_Nk[0].tolist()])
        return weights_Nk @ outs
    order = ids_Nk.flatten().argsort(stable=True)
    counts = torch.bincount(ids_Nk.flatten(), minlength=len(matrices.gate_up)).tolist()
    picked = rows_NH[order // k].split(counts)
    outs = [_expert(rows, expert, matrices) for expert, rows in enumerate(picked) if counts[expert]]
    by_pair = torch.empty_like(rows_NH, memory_format=torch.contiguous_format).new_empty(num_rows * k, rows_NH.shape[1])
    by_pair[order] = torch.cat(outs)
    return torch.bmm(weights_Nk[:, None], by_pair.view(num_rows, k, -1))[:, 0]


def tiled_experts(rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: ExpertWeights) -> Tensor:
    """Run every chosen expert over all rows, summed in order of expert: no shape depends on the routing.

    An expert that a row did not choose adds an exact zero to it.
    """
    out_NH = torch.zeros_like(rows_NH)
    dense_NE = weights_Nk.new_zeros(len(rows_NH), len(matrices.gate_up)).scatter(1, ids_Nk, weights_Nk)
    for expert in sorted(set(ids_Nk.flatten().tolist())):
        weight_N1 = dense_NE[:, expert : expert + 1]
        product = _expert(rows_NH, expert, matrices) * weight_N1
        out_NH += torch.where(weight_N1 == 0, 0.0, product)
    return out_NH
