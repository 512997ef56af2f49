"""Kernel of `attend_frame`. A program computes the query heads that share a key/value head of one
frame; new keys and values stay in registers and are not read back.

Needs Triton, which comes with torch for CUDA. Compiled for an H200, not measured. Slow twin:
`attend_frame` on a CPU. Legend: S frames, T new positions per frame, Q positions that a frame has
room for, h query heads, k key/value heads, d head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fleet.engine.torch.kernels.heads_triton import turned_tile

MOST_POSITIONS = 32
"""Largest number of positions of a frame, which a program reads at once."""
ROWS = 16
"""Number of query heads of a program, counted at all its positions: the smallest number of rows of
a matrix product on a GPU. Smaller numbers of positions or of numbers per head are padded to it.
"""


@triton.jit
def attended(q, k, v, is_seen, scale):
    """Return attention from queries to the keys and values that each sees, in float32."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    exps = tl.exp(scores - tl.max(scores, 1)[:, None])
    sums = tl.dot(exps.to(v.dtype), v, input_precision="ieee")
    return sums / tl.sum(exps, 1)[:, None]


@triton.jit(do_not_specialize=["first", "num_new"])
def attend_group(
    qkv_ptr,
    norm_ptr,
    rope_ptr,
    cache_ptr,
    out_ptr,
    eps,
    scale,
    first,
    num_new,
    qkv_stride,
    POSITIONS: tl.constexpr,
    PADDED_POSITIONS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write attention outputs; the first block of rows also writes the new keys and values.

    Shapes: `qkv` [S x T, (h + 2k) x d]; `cache` [S, Q, 2 x k, d]; `out` [S x T, h, d].
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    frame = tl.program_id(0).to(tl.int64)
    group, block = tl.program_id(1), tl.program_id(2)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = (dim < DIM)[None, :]
    frame_ptr = qkv_ptr + frame * num_new * qkv_stride
    position = tl.arange(0, PADDED_POSITIONS)
    is_new = (position >= first) & (position < first + num_new)
    key_at = frame_ptr + (position - first) * qkv_stride + (HEADS + group) * DIM
    norm_at = norm_ptr + (HEADS + group) * DIM + position * 0
    new_k = turned_tile(
        key_at, norm_at, rope_ptr + position * (2 * DIM), is_new, eps, DIM, PADDED_DIM
    )
    value_at = (key_at + KV_HEADS * DIM)[:, None] + dim[None, :]
    is_new_value = is_new[:, None] & is_dim
    new_v = tl.load(value_at, mask=is_new_value, other=0.0)
    slot = ((frame * POSITIONS + position) * (2 * KV_HEADS) + group) * DIM
    cache_at = cache_ptr + slot[:, None] + dim[None, :]
    is_old_value = (position < first)[:, None] & is_dim
    old_k = tl.load(cache_at, mask=is_old_value, other=0.0)
    old_v = tl.load(cache_at + KV_HEADS * DIM, mask=is_old_value, other=0.0)
    if block == 0:
        tl.store(cache_at, new_k, mask=is_new_value)
        tl.store(cache_at + KV_HEADS * DIM, new_v, mask=is_new_value)
    k = tl.where(is_new[:, None], new_k, old_k)
    v = tl.where(is_new[:, None], new_v, old_v)
    row = block * ROWS + tl.arange(0, ROWS)
    number, head = row // GROUP, group * GROUP + row % GROUP
    is_row = number < num_new
    q_at = frame_ptr + number * qkv_stride + head * DIM
    at = first + number
    turn_at = rope_ptr + at * (2 * DIM)
    q = turned_tile(q_at, norm_ptr + head * DIM, turn_at, is_row, eps, DIM, PADDED_DIM)
    out = attended(q, k, v, position[None, :] <= at[:, None], scale)
    out_at = out_ptr + ((frame * num_new + number) * HEADS + head) * DIM
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_at[:, None] + dim[None, :], out, mask=is_row[:, None] & is_dim)


def launch_attend_frame(
    qkv: Tensor,
    qk_norm_hd: Tensor,
    rope: Tensor,
    cache: Tensor,
    first: int,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    scale: float,
) -> Tensor:
    """Compute `attend_frame` by one kernel. Rows of `qkv` may be further apart than their size; the
    other tensors are contiguous.
    """
    num_frames, num_positions, _, dim = cache.shape
    num_new = len(qkv) // num_frames
    assert len(qkv) == num_frames * num_new and first + num_new <= num_positions <= MOST_POSITIONS
    assert dim % 2 == 0 and qkv.stride(1) == 1 and first + num_new <= len(rope)
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim
    assert qk_norm_hd.is_contiguous() and rope.is_contiguous() and cache.is_contiguous()
    out = torch.empty(len(qkv), num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    num_blocks = triton.cdiv(num_new * (num_heads // num_kv_heads), ROWS)
    attend_group[(num_frames, num_kv_heads, num_blocks)](
        qkv,
        qk_norm_hd,
        rope,
        cache,
        out,
        eps,
        scale,
        first,
        num_new,
        qkv.stride(0),
        POSITIONS=num_positions,
        PADDED_POSITIONS=max(ROWS, triton.next_power_of_2(num_positions)),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        PADDED_DIM=max(ROWS, triton.next_power_of_2(dim)),
        ROWS=ROWS,
    )
    return out
