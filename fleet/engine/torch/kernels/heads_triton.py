"""Kernel of `heads_to_slots`, and the norm and rotary embedding of heads that other kernels share.

A program computes one head of one row, so that a row's bytes do not depend on other rows. Needs
Triton, which comes with torch for CUDA. Compiled for an H200, not measured. Slow twin:
`heads_to_slots` on a CPU. Legend: R heads of a tile, N rows, h query heads, k key/value heads, d
head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 1
"""A head has 128 numbers at published sizes: four per thread of a warp."""


@triton.jit
def turned_tile(
    heads_at,
    norms_at,
    turns_at,
    is_head,
    eps,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Return heads after norm and rotary embedding, in their own type: [R, PADDED_DIM], with zeros
    where `is_head` is False or the head has ended.

    Shapes: pointers to the first number of each head (`heads_at`), of its norm (`norms_at`), and of
    the cosines, which the signed sines follow (`turns_at`); all [R].
    """
    HEAD: tl.constexpr = heads_at.dtype.element_ty
    dim = tl.arange(0, PADDED_DIM)
    across = (dim + DIM // 2) % DIM
    is_read = is_head[:, None] & (dim < DIM)[None, :]
    x = tl.load(heads_at[:, None] + dim[None, :], mask=is_read, other=0.0).to(tl.float32)
    y = tl.load(heads_at[:, None] + across[None, :], mask=is_read, other=0.0).to(tl.float32)
    x_norm = tl.load(norms_at[:, None] + dim[None, :], mask=is_read, other=0.0).to(tl.float32)
    y_norm = tl.load(norms_at[:, None] + across[None, :], mask=is_read, other=0.0).to(tl.float32)
    cos = tl.load(turns_at[:, None] + dim[None, :], mask=is_read, other=0.0).to(tl.float32)
    sin = tl.load(turns_at[:, None] + DIM + dim[None, :], mask=is_read, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x = ((x * scale).to(HEAD).to(tl.float32) * x_norm).to(HEAD).to(tl.float32)
    y = ((y * scale).to(HEAD).to(tl.float32) * y_norm).to(HEAD).to(tl.float32)
    return ((x * cos).to(HEAD).to(tl.float32) + y * sin).to(HEAD)


@triton.jit
def store_heads(
    qkv_ptr,
    norm_ptr,
    rope_ptr,
    positions_ptr,
    slots_ptr,
    kv_ptr,
    q_ptr,
    eps,
    qkv_stride,
    position_stride,
    slot_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Write one head of one row to `q` [N, h, d] or to `kv` [slots, 2 x k, d]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    one = tl.arange(0, 1)
    dim = tl.arange(0, PADDED_DIM)
    is_stored = (dim < DIM)[None, :]
    head_at = qkv_ptr + row * qkv_stride + head * DIM + one
    if head < HEADS + KV_HEADS:
        position = tl.load(positions_ptr + row * position_stride).to(tl.int64)
        value = turned_tile(
            head_at,
            norm_ptr + head * DIM + one,
            rope_ptr + position * (2 * DIM) + one,
            one == 0,
            eps,
            DIM,
            PADDED_DIM,
        )
    else:
        value = tl.load(head_at[:, None] + dim[None, :], mask=is_stored, other=0.0)
    if head < HEADS:
        at = q_ptr + (row * HEADS + head) * DIM + one
        tl.store(at[:, None] + dim[None, :], value, mask=is_stored)
    else:
        slot = tl.load(slots_ptr + row * slot_stride).to(tl.int64)
        at = kv_ptr + (slot * (2 * KV_HEADS) + head - HEADS) * DIM + one
        tl.store(at[:, None] + dim[None, :], value, mask=is_stored)


def launch_heads_to_slots(
    qkv_ND: Tensor,
    qk_norm_hd: Tensor,
    rope: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    kv_slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """Compute `heads_to_slots` by one kernel. Rows of `qkv_ND` may be further apart than their
    size; norms, rotary embedding and `kv_slots` are contiguous.
    """
    num_rows, dim = len(qkv_ND), qk_norm_hd.shape[-1]
    assert dim % 2 == 0 and qkv_ND.stride(1) == 1
    assert qkv_ND.shape[1] == (num_heads + 2 * num_kv_heads) * dim
    assert qk_norm_hd.is_contiguous() and rope.is_contiguous() and kv_slots.is_contiguous()
    q_Nhd = torch.empty(num_rows, num_heads, dim, dtype=qkv_ND.dtype, device=qkv_ND.device)
    store_heads[(num_rows, num_heads + 2 * num_kv_heads)](
        qkv_ND,
        qk_norm_hd,
        rope,
        positions_N,
        slots_N,
        kv_slots,
        q_Nhd,
        eps,
        qkv_ND.stride(0),
        positions_N.stride(0),
        slots_N.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        num_warps=NUM_WARPS,
    )
    return q_Nhd
