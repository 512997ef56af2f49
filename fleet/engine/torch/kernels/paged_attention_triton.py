"""Kernels of `attend_parts`, which reads the pages in place, and `join_parts`: a context is read
once and not copied.

A program of the first kernel computes one part of one context for the query heads that share a
key/value head; a program of the second joins the parts of one query head. Needs Triton, which comes
with torch for CUDA. Compiled for an H200, not measured. Slow twins: the operations on a CPU, and
`StepLayout` with gathered pages.
Legend: B rows, h query heads, k key/value heads, d head size, P pages of a request, C parts of a
context.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FEWEST_ROWS = 16
"""Smallest number of rows of a matrix product on a GPU; fewer query heads are padded to this
number, and heads of fewer numbers as well.
"""
JOIN_WARPS = 2


@triton.jit
def with_block(q, k, v, is_seen, scale, highest, total, out):
    """Return the highest score, the sum of exponentials and the sum of values, with a block
    added.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(is_seen[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    exps = tl.exp(scores - new_highest[:, None])
    fade = tl.exp(highest - new_highest)
    total = total * fade + tl.sum(exps, 1)
    out = out * fade[:, None] + tl.dot(exps.to(v.dtype), v, input_precision="ieee")
    return new_highest, total, out


@triton.jit
def attend_each_part(
    q_ptr,
    kv_ptr,
    pages_ptr,
    positions_ptr,
    out_ptr,
    weight_ptr,
    scale,
    num_pages,
    q_stride,
    position_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a part's attention output, and the logarithm of its sum of exponentials; only the
    logarithm, -inf, if the part is empty.

    Shapes: `q` [B, h, d], a row's heads contiguous; `kv` [slots, 2 x k, d]; `pages` [B, num_pages];
    `out` [B, h, C, d]; `weight` [B, h, C].
    """
    row = tl.program_id(0).to(tl.int64)
    group, part = tl.program_id(1), tl.program_id(2)
    context = tl.load(positions_ptr + row * position_stride).to(tl.int32) + 1
    size = tl.cdiv(tl.cdiv(context, BLOCK), PARTS) * BLOCK
    start = part * size
    stop = tl.minimum(context, start + size)
    head, dim = tl.arange(0, PADDED), tl.arange(0, PADDED_DIM)
    is_head, is_dim = head < GROUP, dim < DIM
    at_head = group * GROUP + head
    at_out = (row * KV_HEADS * GROUP + at_head) * PARTS + part
    highest = tl.full([PADDED], float("-inf"), tl.float32)
    if start >= context:
        tl.store(weight_ptr + at_out, highest, mask=is_head)
        return
    is_q = is_head[:, None] & is_dim[None, :]
    at_q = row * q_stride + at_head[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + at_q, mask=is_q, other=0.0)
    total = tl.zeros([PADDED], tl.float32)
    out = tl.zeros([PADDED, PADDED_DIM], tl.float32)
    for first in range(start, stop, BLOCK):
        position = first + tl.arange(0, BLOCK)
        is_seen = position < stop
        page = tl.load(pages_ptr + row * num_pages + position // PAGE, mask=is_seen, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        at = slot[:, None] * (2 * KV_HEADS * DIM) + group * DIM + dim[None, :]
        is_read = is_seen[:, None] & is_dim[None, :]
        k = tl.load(kv_ptr + at, mask=is_read, other=0.0)
        v = tl.load(kv_ptr + at + KV_HEADS * DIM, mask=is_read, other=0.0)
        highest, total, out = with_block(q, k, v, is_seen, scale, highest, total, out)
    tl.store(weight_ptr + at_out, highest + tl.log(total), mask=is_head)
    tl.store(out_ptr + at_out[:, None] * DIM + dim[None, :], out / total[:, None], mask=is_q)


@triton.jit
def join_each_head(
    out_ptr,
    weight_ptr,
    joined_ptr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the sum of one query head's parts, weighted by their shares of the softmax.

    Shapes: `out` [B x h, C, d]; `weight` [B x h, C]; `joined` [B x h, d].
    """
    head = tl.program_id(0).to(tl.int64)
    part, dim = tl.arange(0, PARTS), tl.arange(0, PADDED_DIM)
    weight = tl.load(weight_ptr + head * PARTS + part)
    exps = tl.exp(weight - tl.max(weight, 0))
    share = exps / tl.sum(exps, 0)
    # the outputs of an empty part were not written
    is_used = (weight != float("-inf"))[:, None] & (dim < DIM)[None, :]
    at = (head * PARTS + part)[:, None] * DIM + dim[None, :]
    out = tl.load(out_ptr + at, mask=is_used, other=0.0)
    joined = tl.sum(share[:, None] * out, 0)
    tl.store(joined_ptr + head * DIM + dim, joined.to(joined_ptr.dtype.element_ty), mask=dim < DIM)


def launch_attend_parts(
    q_Bhd: Tensor,
    kv: Tensor,
    pages_BP: Tensor,
    positions_B: Tensor,
    page_size: int,
    scale: float,
    num_parts: int,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Compute `attend_parts` by one kernel, in up to `num_parts` parts of whole blocks of `block`
    positions; both numbers are powers of two.
    """
    num_rows, num_heads, dim = q_Bhd.shape
    kv_heads = kv.shape[1] // 2
    assert q_Bhd.stride()[1:] == (dim, 1) and kv.is_contiguous() and pages_BP.is_contiguous()
    outs = torch.empty(
        num_rows, num_heads, num_parts, dim, dtype=torch.float32, device=q_Bhd.device
    )
    weights = torch.empty(num_rows, num_heads, num_parts, dtype=torch.float32, device=q_Bhd.device)
    group = num_heads // kv_heads
    attend_each_part[(num_rows, kv_heads, num_parts)](
        q_Bhd,
        kv,
        pages_BP,
        positions_B,
        outs,
        weights,
        scale,
        pages_BP.shape[1],
        q_Bhd.stride(0),
        positions_B.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=max(FEWEST_ROWS, triton.next_power_of_2(group)),
        DIM=dim,
        PADDED_DIM=max(FEWEST_ROWS, triton.next_power_of_2(dim)),
        PAGE=page_size,
        PARTS=num_parts,
        BLOCK=block,
    )
    return outs, weights


def launch_join_parts(outs_BhCd: Tensor, weights_BhC: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `join_parts` by one kernel."""
    num_rows, num_heads, num_parts, dim = outs_BhCd.shape
    assert outs_BhCd.is_contiguous() and weights_BhC.is_contiguous()
    joined = torch.empty(num_rows, num_heads * dim, dtype=dtype, device=outs_BhCd.device)
    join_each_head[(num_rows * num_heads,)](
        outs_BhCd,
        weights_BhC,
        joined,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        PARTS=num_parts,
        num_warps=JOIN_WARPS,
    )
    return joined
