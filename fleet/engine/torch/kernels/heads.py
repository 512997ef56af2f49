"""The query, key and value heads of a step's rows, between the product that computes them and
attention: norm, rotary embedding, and keys and values stored in the KV pool.

Legend: N rows, h query heads, k key/value heads, d head size (even), D = (h + 2k) x d.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("fleet::heads_to_slots", mutates_args=("kv_slots",), device_types="cpu")
def heads_to_slots(
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
    """Apply the norm and the rotary embedding to query and key heads, store keys and values in
    `kv_slots`, and return the queries: [N, h, d].

    Shapes: `qk_norm_hd` [h + k, d], one row per head; `rope` [positions, 2 (cosine, signed sine),
    1, d]; `kv_slots` [slots, 2 x k, d], keys first. `positions_N` and `slots_N` are int64, and
    their numbers may be apart. Several rows may have the same slot only if it is never attended to.
    Slow twin of `store_heads`.
    """
    q_Nhd, kv_Nkd = turned_heads(
        qkv_ND, qk_norm_hd, rope, positions_N, num_heads, num_kv_heads, eps
    )
    kv_slots.index_copy_(0, slots_N, kv_Nkd)
    return q_Nhd


@heads_to_slots.register_kernel("cuda")
def _heads_to_slots_on_gpu(
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
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.heads_triton import launch_heads_to_slots

    return launch_heads_to_slots(
        qkv_ND, qk_norm_hd, rope, positions_N, slots_N, kv_slots, num_heads, num_kv_heads, eps
    )


@heads_to_slots.register_fake
def _heads_to_slots_shape(
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
    return qkv_ND.new_empty(len(qkv_ND), num_heads, qk_norm_hd.shape[-1])


def turned_heads(
    qkv_ND: Tensor,
    qk_norm_hd: Tensor,
    rope: Tensor,
    positions_N: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the heads after norm and rotary embedding, which values do not have: queries
    [N, h, d], and keys and values [N, 2 x k, d]. All steps are rounded to the dtype of `qkv_ND`.
    """
    dim, num_turned = qk_norm_hd.shape[-1], num_heads + num_kv_heads
    heads = qkv_ND.unflatten(-1, (-1, dim))
    normed = F.rms_norm(heads[:, :num_turned], (dim,), None, eps) * qk_norm_hd
    cos, sin = rope[positions_N].unbind(-3)
    # rotate_half(x) * sin == roll(x) * sin with the sign of its first half flipped
    turned = (normed * cos).addcmul_(normed.roll(dim // 2, -1), sin)
    q_Nhd, keys_Nkd = turned.split((num_heads, num_kv_heads), 1)
    return q_Nhd.contiguous(), torch.cat([keys_Nkd, heads[:, num_turned:]], 1)
