"""Mixture-of-experts layer of a few rows in four operations: the choice of experts, the two
products of each (row, chosen expert) pair, and the weighted sum.

On a GPU the weights of each chosen expert are read once for all its rows, and no sort comes before.
Legend: N rows, H hidden size, I expert width, E experts, k experts per row. Pair n x k + j is row n
with its j-th expert.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.kernels.row_product import normed_rows

MAX_PAIRS = 512
"""Largest number of (row, expert) pairs, such as 64 rows with 8 experts each: every program of the
kernel reads all ids.
"""


def route(
    logits_NE: Tensor, num_chosen: int, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's most probable experts in falling order, their weights, and the weight of
    the shared expert: (ids int64 [N, k], weights [N, k], shared [N, 1]).

    The weights are a softmax over all experts, computed in float32, divided by their sum if
    `normalise`, and rounded to the logits' dtype. Of equal experts the one with the lower id comes
    first. With `has_shared` the logits have one further column, whose sigmoid is `shared`; without,
    `shared` is [N, 0].
    """
    return _route(logits_NE, num_chosen, normalise, has_shared)


def expert_gate_up(
    rows_NH: Tensor,
    ids_Nk: Tensor,
    gate_up: Tensor,
    norm_H: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return SiLU(gate) x up of each pair: [N x k, I].

    Shapes: `gate_up` [E, 2 x I, H], the gate first; rows may be further apart than their size. With
    `norm_H` and `eps` the rows first pass an RMS norm with that weight. All intermediate results
    are rounded to the rows' dtype.
    Invariants: on a GPU a row's bytes do not depend on the other rows. Ids are below E.
    Raises: ValueError if there are more than `MAX_PAIRS` pairs.
    """
    assert (norm_H is None) == (eps is None), "a norm needs its weight and eps"
    _check_pairs(ids_Nk)
    return _expert_gate_up(rows_NH, ids_Nk, gate_up, norm_H, eps or 0.0)


def expert_down(acts: Tensor, ids_Nk: Tensor, down: Tensor) -> Tensor:
    """Return the product of each pair's activations with its expert's matrix: [N x k, H].

    Shapes: `acts` [N x k, I]; `down` [E, H, I].
    Invariants: on a GPU a row's bytes do not depend on the other rows. Ids are below E.
    Raises: ValueError if there are more than `MAX_PAIRS` pairs.
    """
    _check_pairs(ids_Nk)
    return _expert_down(acts, ids_Nk, down)


def combine_experts(
    outs: Tensor,
    weights_Nk: Tensor,
    residual_NH: Tensor,
    shared_NH: Tensor | None = None,
    shared_gate_N1: Tensor | None = None,
) -> Tensor:
    """Return residual + weighted sum of the experts' outputs + `shared_gate_N1` x `shared_NH`:
    [N, H].

    Shapes: `outs` [N x k, H]. The weighted sum is accumulated in float32 in the order of k; it and
    each further step are rounded to the dtype of `outs`.
    """
    assert (shared_NH is None) == (shared_gate_N1 is None), "a shared expert needs its weight"
    return _combine_experts(outs, weights_Nk, residual_NH, shared_NH, shared_gate_N1)


def _check_pairs(ids_Nk: Tensor) -> None:
    if ids_Nk.numel() > MAX_PAIRS:
        raise ValueError(
            f"{ids_Nk.numel()} pairs of rows and experts; at most {MAX_PAIRS} are multiplied at a"
            " time"
        )


@torch.library.custom_op("fleet::route", mutates_args=(), device_types="cpu")
def _route(
    logits: Tensor, num_chosen: int, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Slow twin of `choose_experts`."""
    num_experts = logits.shape[1] - has_shared
    probabilities = logits[:, :num_experts].softmax(-1, dtype=torch.float32)
    # topk leaves the order of equal values open
    falling, order = probabilities.sort(dim=-1, descending=True, stable=True)
    weights = falling[:, :num_chosen]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    shared = logits[:, num_experts:].sigmoid()
    return order[:, :num_chosen].contiguous(), weights.to(logits.dtype).contiguous(), shared


@_route.register_kernel("cuda")
def _route_on_gpu(
    logits: Tensor, num_chosen: int, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.routed_experts_triton import launch_route

    return launch_route(logits, num_chosen, normalise, has_shared)


@_route.register_fake
def _route_shapes(
    logits: Tensor, num_chosen: int, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = len(logits)
    return (
        logits.new_empty(num_rows, num_chosen, dtype=torch.int64),
        logits.new_empty(num_rows, num_chosen),
        logits.new_empty(num_rows, int(has_shared)),
    )


def _by_expert(rows: Tensor, ids: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return `product` of each pair's row and its expert, one expert after another. Shapes: `rows`
    has a row for each of the `ids`.
    """
    order = ids.argsort(stable=True)
    experts, counts = ids.unique(return_counts=True)
    parts = rows[order].split(counts.tolist())
    outs = torch.cat(
        [product(part, expert) for part, expert in zip(parts, experts.tolist(), strict=True)]
    )
    by_pair = torch.empty_like(outs)
    by_pair[order] = outs
    return by_pair


@torch.library.custom_op("fleet::expert_gate_up", mutates_args=(), device_types="cpu")
def _expert_gate_up(
    rows: Tensor, ids: Tensor, gate_up: Tensor, norm: Tensor | None, eps: float
) -> Tensor:
    """Slow twin of `multiply_chosen` with a gate."""
    normed = rows if norm is None else normed_rows(rows, norm, eps)

    def act(part: Tensor, expert: int) -> Tensor:
        gate, up = F.linear(part, gate_up[expert]).chunk(2, dim=-1)
        return F.silu(gate) * up

    return _by_expert(normed.repeat_interleave(ids.shape[1], 0), ids.flatten(), act)


@_expert_gate_up.register_kernel("cuda")
def _expert_gate_up_on_gpu(
    rows: Tensor, ids: Tensor, gate_up: Tensor, norm: Tensor | None, eps: float
) -> Tensor:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.routed_experts_triton import launch_gate_up

    return launch_gate_up(rows, ids, gate_up, norm, eps)


@_expert_gate_up.register_fake
def _expert_gate_up_shape(
    rows: Tensor, ids: Tensor, gate_up: Tensor, norm: Tensor | None, eps: float
) -> Tensor:
    return rows.new_empty(ids.numel(), gate_up.shape[1] // 2)


@torch.library.custom_op("fleet::expert_down", mutates_args=(), device_types="cpu")
def _expert_down(acts: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    """Slow twin of `multiply_chosen` without a gate."""
    return _by_expert(acts, ids.flatten(), lambda part, expert: F.linear(part, down[expert]))


@_expert_down.register_kernel("cuda")
def _expert_down_on_gpu(acts: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.routed_experts_triton import launch_down

    return launch_down(acts, ids, down)


@_expert_down.register_fake
def _expert_down_shape(acts: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    return acts.new_empty(ids.numel(), down.shape[1])


@torch.library.custom_op("fleet::combine_experts", mutates_args=(), device_types="cpu")
def _combine_experts(
    outs: Tensor,
    weights: Tensor,
    residual: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    """Slow twin of `add_experts`."""
    total = torch.bmm(weights[:, None], outs.view(*weights.shape, -1))[:, 0]
    if shared is not None and shared_gate is not None:
        total = total + shared_gate * shared
    return residual + total


@_combine_experts.register_kernel("cuda")
def _combine_experts_on_gpu(
    outs: Tensor,
    weights: Tensor,
    residual: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.routed_experts_triton import launch_combine

    return launch_combine(outs, weights, residual, shared, shared_gate)


@_combine_experts.register_fake
def _combine_experts_shape(
    outs: Tensor,
    weights: Tensor,
    residual: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    return torch.empty_like(residual)
