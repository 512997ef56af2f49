"""Kernels of the operations of `routed_experts`.

Needs Triton, which comes with torch for CUDA. Memory-bound: sizes are chosen for an H200, not
measured. Slow twins: the operations on a CPU. Legend: N rows, H hidden size, I expert width, E
experts, k experts per row, P pairs of a row and an expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fleet.engine.torch.kernels.product_tiles_triton import (
    NUM_STAGES,
    NUM_WARPS,
    ROWS,
    gated_values,
    rounded,
    tile_inputs,
    tile_product,
)

GATED_OUTPUTS = 16
"""Outputs of a program with a gate, which reads two weight rows for each."""
PLAIN_OUTPUTS = 32
"""Outputs of a program without a gate."""
SCANNED_IDS = 128
"""Number of ids that a program reads per iteration when it looks for the pairs of its expert."""
SUM_OUTPUTS = 512
"""Outputs of a program that adds experts."""


@triton.jit
def choose_experts(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    row_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the ids, weights and shared weight of one row."""
    DTYPE: tl.constexpr = weights_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    is_expert = expert < E
    logits_at = logits_ptr + row * row_stride
    logits = tl.load(logits_at + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(shares, 0)
    left = tl.where(is_expert, shares / total, -1.0)
    ids = tl.zeros([PADDED_K], tl.int32)
    weights = tl.zeros([PADDED_K], tl.float32)
    for j in range(K):
        highest = tl.max(left, 0)
        # of a row with NaN no expert is the highest
        chosen = tl.minimum(tl.min(tl.where(left == highest, expert, E), 0), E - 1)
        ids = tl.where(place == j, chosen, ids)
        weights = tl.where(place == j, highest, weights)
        left = tl.where(expert == chosen, -1.0, left)
    if NORMALISE:
        weights = weights / tl.sum(weights, 0)
    weights = tl.where(total == total, weights, total)
    is_place = place < K
    tl.store(ids_ptr + row * K + place, ids.to(tl.int64), mask=is_place)
    weights = rounded(weights, DTYPE, INTERPRETED).to(DTYPE)
    tl.store(weights_ptr + row * K + place, weights, mask=is_place)
    if HAS_SHARED:
        gate = tl.load(logits_at + E).to(tl.float32)
        gate = rounded(1.0 / (1.0 + tl.exp(-gate)), DTYPE, INTERPRETED)
        tl.store(shared_ptr + row, gate.to(DTYPE))


@triton.jit
def count_pairs(ids_ptr, expert, num_pairs, SCAN: tl.constexpr):
    """Return the first pair of an expert (`num_pairs` or more if it has none), and the number of
    its pairs.
    """
    earliest = num_pairs
    count = 0
    for start in range(0, num_pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_chosen = ids == expert
        earliest = tl.minimum(earliest, tl.min(tl.where(is_chosen, pair, num_pairs), 0))
        count += tl.sum(is_chosen.to(tl.int32), 0)
    return earliest, count


@triton.jit
def find_pairs(ids_ptr, expert, num_pairs, wanted, SCAN: tl.constexpr):
    """Return the pairs of an expert that are the `wanted`-th in order of pairs, or 0: [ROWS]."""
    found = tl.zeros([ROWS], tl.int32)
    before = 0
    for start in range(0, num_pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_chosen = ids == expert
        chosen = is_chosen.to(tl.int32)
        place = before + tl.cumsum(chosen, 0) - 1
        is_wanted = is_chosen[None, :] & (place[None, :] == wanted[:, None])
        found += tl.sum(tl.where(is_wanted, pair[None, :], 0), 1)
        before += tl.sum(chosen, 0)
    return found


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_chosen(
    rows_ptr,
    ids_ptr,
    weight_ptr,
    norm_ptr,
    out_ptr,
    eps,
    num_pairs,
    row_stride,
    PAIRS_PER_ROW: tl.constexpr,
    H: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write a block of outputs of all pairs of one expert: the expert of a pair if `BY_PAIR`, where
    nothing is done unless the pair is the expert's first, else the expert with the program's
    number.

    Shapes: `ids` [P]; `weight` [E, 2 x O with a gate, H]; `out` [P, O].
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    MATRIX: tl.constexpr = OUTPUTS * H * 2 if GATED else OUTPUTS * H
    UP: tl.constexpr = OUTPUTS * H if GATED else 0
    number = tl.program_id(1)
    expert = number
    if BY_PAIR:
        expert = tl.load(ids_ptr + number).to(tl.int32)
    earliest, num_chosen = count_pairs(ids_ptr, expert, num_pairs, SCAN)
    if BY_PAIR:
        num_chosen = tl.where(earliest == number, num_chosen, 0)
    first_output = tl.program_id(0) * BLOCK_O
    output = first_output + tl.arange(0, BLOCK_O)
    is_output = output < OUTPUTS
    # the block's place may exceed 32 bits, the place within it does not
    block_ptr = weight_ptr + expert.to(tl.int64) * MATRIX + first_output.to(tl.int64) * H
    weight_at = block_ptr + (tl.arange(0, BLOCK_O) * H)[None, :]
    for first in range(0, num_chosen, ROWS):
        wanted = first + tl.arange(0, ROWS)
        is_row = wanted < num_chosen
        pair = find_pairs(ids_ptr, expert, num_pairs, wanted, SCAN)
        rows_at = rows_ptr + (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * row_stride
        value, up = tile_product(
            rows_at, is_row, weight_at, is_output, norm_ptr, eps, UP, H, BLOCK_H, DTYPE, INTERPRETED
        )
        if GATED:
            value = gated_values(value, up, DTYPE, INTERPRETED)
        else:
            value = rounded(value, DTYPE, INTERPRETED)
        at_out = pair[:, None] * OUTPUTS + output[None, :]
        is_out = is_row[:, None] & is_output[None, :]
        tl.store(out_ptr + at_out, value.to(DTYPE), mask=is_out)


@triton.jit
def add_experts(
    outs_ptr,
    weights_ptr,
    residual_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    residual_stride,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write a block of one row. The shared expert's output and weight may be None."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_h = h < H
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(weights_ptr + row * K + j).to(tl.float32)
        out = tl.load(outs_ptr + (row * K + j) * H + h, mask=is_h, other=0.0)
        total += weight * out.to(tl.float32)
    total = rounded(total, DTYPE, INTERPRETED)
    if shared_ptr is not None:
        gate = tl.load(gate_ptr + row).to(tl.float32)
        shared = tl.load(shared_ptr + row * H + h, mask=is_h, other=0.0).to(tl.float32)
        total = rounded(total + rounded(gate * shared, DTYPE, INTERPRETED), DTYPE, INTERPRETED)
    residual = tl.load(residual_ptr + row * residual_stride + h, mask=is_h, other=0.0)
    total = rounded(residual.to(tl.float32) + total, DTYPE, INTERPRETED)
    tl.store(out_ptr + row * H + h, total.to(DTYPE), mask=is_h)


def launch_route(
    logits: Tensor, num_chosen: int, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `choose_experts` on arguments as of `route`; tensors on a CPU need Triton's
    interpreter.
    """
    num_rows, num_experts = len(logits), logits.shape[1] - has_shared
    assert logits.stride(1) == 1 and num_chosen <= num_experts
    ids = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, num_chosen, dtype=logits.dtype, device=logits.device)
    shared = torch.empty(num_rows, int(has_shared), dtype=logits.dtype, device=logits.device)
    if num_rows:
        choose_experts[(num_rows,)](
            logits,
            ids,
            weights,
            shared,
            logits.stride(0),
            E=num_experts,
            K=num_chosen,
            PADDED_E=triton.next_power_of_2(num_experts),
            PADDED_K=triton.next_power_of_2(num_chosen),
            NORMALISE=normalise,
            HAS_SHARED=has_shared,
            INTERPRETED=logits.device.type == "cpu",
            num_warps=1,  # a row has few experts
        )
    return ids, weights, shared


def launch_gate_up(
    rows: Tensor, ids: Tensor, gate_up: Tensor, norm: Tensor | None, eps: float
) -> Tensor:
    """Launch `multiply_chosen` on arguments as of `expert_gate_up`; tensors on a CPU need Triton's
    interpreter.
    """
    return _launch_chosen(rows, ids, gate_up, norm, eps, gated=True)


def launch_down(acts: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    """Launch `multiply_chosen` on arguments as of `expert_down`; tensors on a CPU need Triton's
    interpreter.
    """
    return _launch_chosen(acts, ids, down, None, 0.0, gated=False)


def _launch_chosen(
    rows: Tensor, ids: Tensor, weight: Tensor, norm: Tensor | None, eps: float, *, gated: bool
) -> Tensor:
    num_experts, num_weight_rows, inputs = weight.shape
    outputs = num_weight_rows // (2 if gated else 1)
    num_pairs = ids.numel()
    assert ids.is_contiguous() and weight.is_contiguous() and rows.stride(1) == 1
    assert rows.shape[1] == inputs
    out = torch.empty(num_pairs, outputs, dtype=rows.dtype, device=rows.device)
    if num_pairs == 0:
        return out
    block = GATED_OUTPUTS if gated else PLAIN_OUTPUTS
    by_pair = num_pairs <= num_experts
    grid = (triton.cdiv(outputs, block), num_pairs if by_pair else num_experts)
    multiply_chosen[grid](
        rows,
        ids,
        weight,
        norm,
        out,
        eps,
        num_pairs,
        rows.stride(0),
        PAIRS_PER_ROW=num_pairs // len(rows),
        H=inputs,
        OUTPUTS=outputs,
        GATED=gated,
        BY_PAIR=by_pair,
        SCAN=SCANNED_IDS,
        BLOCK_O=block,
        BLOCK_H=tile_inputs(rows.dtype, block * (2 if gated else 1)),
        INTERPRETED=rows.device.type == "cpu",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


def launch_combine(
    outs: Tensor,
    weights: Tensor,
    residual: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    """Launch `add_experts` on arguments as of `combine_experts`; tensors on a CPU need Triton's
    interpreter.
    """
    num_rows, num_chosen = weights.shape
    hidden_size = outs.shape[1]
    assert outs.is_contiguous() and weights.is_contiguous() and residual.stride(1) == 1
    assert shared is None or shared.is_contiguous()
    out = torch.empty(num_rows, hidden_size, dtype=outs.dtype, device=outs.device)
    if num_rows:
        add_experts[(num_rows, triton.cdiv(hidden_size, SUM_OUTPUTS))](
            outs,
            weights,
            residual,
            shared,
            shared_gate,
            out,
            residual.stride(0),
            K=num_chosen,
            H=hidden_size,
            BLOCK=SUM_OUTPUTS,
            INTERPRETED=outs.device.type == "cpu",
            num_warps=NUM_WARPS,
        )
    return out
