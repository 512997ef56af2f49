"""Attention of single rows as a Triton kernel that reads the pages in place: a context is read once
and not copied.

A program of the kernel computes one part of one context for the query heads that share a key/value
head; the parts are then weighted by their share of the softmax. Needs Triton, which comes with
torch for CUDA. Slow twin: `StepLayout` with gathered pages.
Legend: B rows, h query heads, k key/value heads, d head size, P pages of a request, C parts of a
context.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PARTS = 8
"""Number of parts of a context, which are computed in parallel."""
BLOCK = 32
"""Number of positions that a kernel program reads per iteration of its loop."""
MIN_HEADS = 16
"""Smallest number of rows of a matrix product on a GPU; fewer query heads are padded to this
number.
"""


@triton.jit
def attend_parts(  # pyright: ignore
    q_ptr,
    kv_ptr,
    pages_ptr,
    contexts_ptr,
    out_ptr,
    weight_ptr,
    scale,
    num_pages,
    q_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each part's attention output, and the logarithm of the part's sum of exponentials.

    Shapes: `q` [B, h, d], a row's heads contiguous; `kv` [slots, 2 x k, d]; `pages` [B, num_pages];
    `out` [B, h, C, d]; `weight` [B, h, C].
    """
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + row)
    size = tl.cdiv(tl.cdiv(context, BLOCK), PARTS) * BLOCK
    stop = tl.minimum(context, part * size + size)
    head, dim = tl.arange(0, PADDED), tl.arange(0, PADDED_DIM)
    is_head, is_dim = head < GROUP, dim < DIM
    at_head = group * GROUP + head
    is_q = is_head[:, None] & is_dim[None, :]
    at_q = row * q_stride + at_head[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + at_q, mask=is_q, other=0.0)
    highest = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    out = tl.zeros([PADDED, PADDED_DIM], tl.float32)
    for first in range(part * size, stop, BLOCK):
        position = first + tl.arange(0, BLOCK)
        is_seen = position < stop
        page = tl.load(pages_ptr + row * num_pages + position // PAGE, mask=is_seen, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        at = slot[:, None] * (2 * KV_HEADS * DIM) + group * DIM + dim[None, :]
        is_read = is_seen[:, None] & is_dim[None, :]
        k = tl.load(kv_ptr + at, mask=is_read, other=0.0)
        v = tl.load(kv_ptr + at + KV_HEADS * DIM, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        fade = tl.exp(highest - new_highest)
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    at_out = (row * KV_HEADS * GROUP + at_head) * PARTS + part
    divisor = tl.where(total > 0, total, 1.0)  # an empty part has weight zero and output zero
    weight = tl.where(total > 0, highest + tl.log(divisor), float("-inf"))
    tl.store(weight_ptr + at_out, weight, mask=is_head)
    shared = out / divisor[:, None]
    tl.store(out_ptr + at_out[:, None] * DIM + dim[None, :], shared, mask=is_q)


def attend_in_place(
    q_Bhd: Tensor, kv: Tensor, pages_BP: Tensor, contexts_B: Tensor, page_size: int, scale: float
) -> Tensor:
    """Compute attention from each row to the first `contexts_B` positions (at least 1) of its
    pages. Returns [B, h x d].

    Shapes: `kv` is [slots, 2 x k, d], keys first; `pages_BP` int32; rows of `q_Bhd` may be further
    apart than their size.
    """
    num_rows, num_heads, dim = q_Bhd.shape
    kv_heads = kv.shape[1] // 2
    assert q_Bhd.stride()[1:] == (dim, 1) and kv.is_contiguous() and pages_BP.is_contiguous()
    outs = torch.empty(
        num_rows, num_heads, NUM_PARTS, dim, dtype=torch.float32, device=q_Bhd.device
    )
    weights = torch.empty(num_rows, num_heads, NUM_PARTS, dtype=torch.float32, device=q_Bhd.device)
    group = num_heads // kv_heads
    attend_parts[(num_rows, kv_heads, NUM_PARTS)](
        q_Bhd,
        kv,
        pages_BP,
        contexts_B,
        outs,
        weights,
        scale,
        pages_BP.shape[1],
        q_Bhd.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=max(MIN_HEADS, triton.next_power_of_2(group)),
        DIM=dim,
        PADDED_DIM=max(16, triton.next_power_of_2(dim)),
        PAGE=page_size,
        PARTS=NUM_PARTS,
        BLOCK=BLOCK,
    )
    joined = weights.softmax(-1)[:, :, None] @ outs
    return joined.view(num_rows, num_heads * dim).to(q_Bhd.dtype)
