"""Mixture-of-experts layers by two methods: matrix products grouped by expert (fast numerics), or
every chosen expert over the whole tile (invariant numerics).

Legend: N rows, H hidden size, I expert width, E experts, k experts per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Weight matrices of all experts of a layer. Shapes: `gate_up` [E, 2 x I, H], `down` [E, H,
    I].
    """

    gate_up: Tensor
    down: Tensor

    @property
    def is_aligned(self) -> bool:
        """Return True if every row begins at a multiple of 16 bytes, which `F.grouped_mm`
        requires.
        """
        return all(
            weight.stride(-2) * weight.itemsize % 16 == 0 for weight in (self.gate_up, self.down)
        )


Experts = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]
"""Function that returns the weighted sum of each row's experts: (rows [N, H], expert ids [N, k],
weights [N, k], matrices) -> [N, H].
"""


def _expert(rows_nH: Tensor, expert: int, matrices: ExpertWeights) -> Tensor:
    gate, up = F.linear(rows_nH, matrices.gate_up[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, matrices.down[expert])


def grouped_experts(
    rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: ExpertWeights
) -> Tensor:
    """Return the weighted sum of each row's experts: by `grouped_products` where that is possible
    and faster, else by `looped_experts`.
    """
    if not matrices.is_aligned or (len(rows_NH) == 1 and rows_NH.device.type == "cpu"):
        # one row: twice as fast on a CPU (measured)
        return looped_experts(rows_NH, ids_Nk, weights_Nk, matrices)
    return grouped_products(rows_NH, ids_Nk, weights_Nk, matrices)


def grouped_products(
    rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: ExpertWeights
) -> Tensor:
    """Return the weighted sum of each row's experts, computed as two grouped products. The number
    of kernels does not depend on the routing, which the host need not know.
    """
    k = ids_Nk.shape[1]
    order, ends_E = pairs_by_expert(ids_Nk, len(matrices.gate_up))
    gate, up = F.grouped_mm(rows_NH[order // k], matrices.gate_up.mT, offs=ends_E).chunk(2, dim=-1)
    outs = F.grouped_mm(F.silu(gate) * up, matrices.down.mT, offs=ends_E)
    return weighted_sum(outs, order, weights_Nk)


def pairs_by_expert(ids_Nk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of the pairs of a row and an expert by expert [N x k], and the int32 end of
    each expert's pairs in that order [E].
    """
    expert_of_pair, order = ids_Nk.flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, device=ids_Nk.device)
    return order, torch.searchsorted(expert_of_pair, experts_E, right=True, out_int32=True)


def looped_experts(
    rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: ExpertWeights
) -> Tensor:
    """Return the weighted sum of each row's experts, running one chosen expert after another over
    its rows only: the slow twin of `grouped_products`.
    """
    num_rows, k = ids_Nk.shape
    if num_rows == 1:
        outs = torch.cat([_expert(rows_NH, expert, matrices) for expert in ids_Nk[0].tolist()])
        return weights_Nk @ outs
    order = ids_Nk.flatten().argsort(stable=True)
    counts = torch.bincount(ids_Nk.flatten(), minlength=len(matrices.gate_up)).tolist()
    picked = rows_NH[order // k].split(counts)
    outs = torch.cat(
        [_expert(rows, expert, matrices) for expert, rows in enumerate(picked) if counts[expert]]
    )
    return weighted_sum(outs, order, weights_Nk)


def weighted_sum(outs: Tensor, order: Tensor, weights_Nk: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs for each row. Shapes: `outs` [N x k, H],
    ordered by expert; `order` [N x k], the permutation that ordered them.
    """
    by_pair = torch.empty_like(outs)
    by_pair[order] = outs
    return torch.bmm(weights_Nk[:, None], by_pair.view(*weights_Nk.shape, -1))[:, 0]


def tiled_experts(
    rows_NH: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, matrices: ExpertWeights
) -> Tensor:
    """Return the weighted sum of each row's experts by running every expert that some row chose
    over all rows, in order of expert, so that no shape depends on the routing.

    An expert that a row did not choose adds an exact zero to it.
    """
    out_NH = torch.zeros_like(rows_NH)
    dense_NE = weights_Nk.new_zeros(len(rows_NH), len(matrices.gate_up)).scatter(
        1, ids_Nk, weights_Nk
    )
    for expert in sorted(set(ids_Nk.flatten().tolist())):
        weight_N1 = dense_NE[:, expert : expert + 1]
        product = _expert(rows_NH, expert, matrices) * weight_N1
        out_NH += torch.where(weight_N1 == 0, 0.0, product)
    return out_NH
