"""Kernel of `draw_codes`. A program computes one frame, whose logits it keeps in registers.

Needs Triton, which comes with torch for CUDA. Compiled for an H200, not measured. Slow twin:
`draw_codes` on a CPU. Legend: S frames, V codebook size, H hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 16
"""With 2,048 codes a thread has four logits; with fewer warps the program would be longer, as each
logit has two logarithms in float64.
"""
FEWEST_LOGITS = 16
FEWEST_BEST = 2
"""Smallest number of highest logits that Triton 3.7 can find."""


@triton.jit
def mixed32(x):
    """Mix uint32 numbers by the bijection of `fleet.engine.torch.noise`; products wrap."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel_noise(code, low, high):
    """Return the noise of codes for the two halves of a noise key, float32: `gumbel_of_halves`."""
    mixed = mixed32(mixed32(code.to(tl.uint32) ^ low.to(tl.uint32)) ^ high.to(tl.uint32))
    uniform = (mixed.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 to the power of -32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def lowest_kept(logits, top_p, LIMIT: tl.constexpr, PADDED_LIMIT: tl.constexpr):
    """Return the lowest logit above the cut to the `LIMIT` highest ones, and among them to those
    above which the probabilities sum to less than `top_p`; as `keep_top_alike`.
    """
    best = tl.topk(logits, PADDED_LIMIT)
    is_counted = tl.arange(0, PADDED_LIMIT) < LIMIT
    exps = tl.where(is_counted, tl.exp(best - tl.max(best, 0)), 0.0)
    share = exps / tl.sum(exps, 0)
    before = tl.cumsum(share, 0) - share
    is_cut = (before >= top_p) & (top_p < 1.0)
    return tl.min(tl.where(is_counted & (is_cut == 0), best, float("inf")), 0)


@triton.jit
def draw_each_code(
    logits_ptr,
    low_ptr,
    high_ptr,
    is_sampled_ptr,
    embedding_ptr,
    sum_ptr,
    codes_ptr,
    row_ptr,
    new_sum_ptr,
    top_p,
    logits_stride,
    low_stride,
    high_stride,
    is_sampled_stride,
    sum_stride,
    CODES: tl.constexpr,
    PADDED_CODES: tl.constexpr,
    LIMIT: tl.constexpr,
    PADDED_LIMIT: tl.constexpr,
    IS_CUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
):
    """Write a frame's code, its embedding, and the sum with it."""
    frame = tl.program_id(0).to(tl.int64)
    code = tl.arange(0, PADDED_CODES)
    is_code = code < CODES
    logits = tl.load(
        logits_ptr + frame * logits_stride + code, mask=is_code, other=float("-inf")
    ).to(tl.float32)
    if tl.load(is_sampled_ptr + frame * is_sampled_stride) != 0:
        if IS_CUT:
            lowest = lowest_kept(logits, top_p, LIMIT, PADDED_LIMIT)
            logits = tl.where(logits < lowest, float("-inf"), logits)
        low = tl.load(low_ptr + frame * low_stride)
        high = tl.load(high_ptr + frame * high_stride)
        logits += gumbel_noise(code, low, high)
    # the lowest code of a tie, thus none of the padding
    drawn = tl.minimum(tl.argmax(logits, 0), CODES - 1).to(tl.int64)
    tl.store(codes_ptr + frame, drawn)
    at = tl.arange(0, PADDED_HIDDEN)
    is_hidden = at < HIDDEN
    row = tl.load(embedding_ptr + drawn * HIDDEN + at, mask=is_hidden)
    tl.store(row_ptr + frame * HIDDEN + at, row, mask=is_hidden)
    total = tl.load(sum_ptr + frame * sum_stride + at, mask=is_hidden).to(tl.float32)
    total += row.to(tl.float32)
    new_sum_at = new_sum_ptr + frame * HIDDEN + at
    tl.store(new_sum_at, total.to(new_sum_ptr.dtype.element_ty), mask=is_hidden)


def launch_draw_codes(
    logits_SV: Tensor,
    low_S: Tensor,
    high_S: Tensor,
    is_sampled_S: Tensor,
    embedding_VH: Tensor,
    sum_SH: Tensor,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `draw_codes` by one kernel. Rows of logits and of sums may be further apart than
    their size.
    """
    (num_frames, num_codes), hidden_size = logits_SV.shape, embedding_VH.shape[1]
    assert logits_SV.stride(1) == 1 and sum_SH.stride(1) == 1 and embedding_VH.is_contiguous()
    assert len(embedding_VH) == num_codes and sum_SH.shape == (num_frames, hidden_size)
    limit = top_k if 0 < top_k < num_codes else num_codes
    codes_S = torch.empty(num_frames, dtype=torch.int64, device=logits_SV.device)
    row_SH = embedding_VH.new_empty(num_frames, hidden_size)
    new_sum_SH = sum_SH.new_empty(num_frames, hidden_size)
    draw_each_code[(num_frames,)](
        logits_SV,
        low_S,
        high_S,
        is_sampled_S,
        embedding_VH,
        sum_SH,
        codes_S,
        row_SH,
        new_sum_SH,
        top_p,
        logits_SV.stride(0),
        low_S.stride(0),
        high_S.stride(0),
        is_sampled_S.stride(0),
        sum_SH.stride(0),
        CODES=num_codes,
        PADDED_CODES=max(FEWEST_LOGITS, triton.next_power_of_2(num_codes)),
        LIMIT=limit,
        PADDED_LIMIT=max(FEWEST_BEST, triton.next_power_of_2(limit)),
        IS_CUT=limit < num_codes or top_p < 1.0,
        HIDDEN=hidden_size,
        PADDED_HIDDEN=triton.next_power_of_2(hidden_size),
        num_warps=NUM_WARPS,
    )
    return codes_S, row_SH, new_sum_SH
