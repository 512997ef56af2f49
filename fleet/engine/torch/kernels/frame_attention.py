"""Attention within codec frames, each a short sequence of its own, as one operation: norm, rotary
embedding, stored keys and values, and causal attention.

Legend: S frames, T new positions per frame, Q positions that a frame has room for, h query heads, k
key/value heads, d head size (even), D = (h + 2k) x d.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.kernels.heads import turned_heads


@torch.library.custom_op("fleet::attend_frame", mutates_args=("cache",), device_types="cpu")
def attend_frame(
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
    """Store the keys and values of new positions in `cache`, and compute attention from each of
    them to its frame's positions up to its own: [S x T, h x d].

    Shapes: `qkv` [S x T, D], where a frame's rows follow each other and are at positions `first` to
    `first` + T - 1; `qk_norm_hd` [h + k, d], one row per head; `rope` [positions, 2 (cosine, signed
    sine), 1, d]; `cache` [S, Q, 2 x k, d], keys first, with Q up to 32.
    Slow twin of `attend_group`.
    """
    num_frames, dim = len(cache), cache.shape[-1]
    num_new = len(qkv) // num_frames
    positions_T = torch.arange(first, first + num_new, device=qkv.device)
    q_Nhd, kv_Nkd = turned_heads(
        qkv, qk_norm_hd, rope, positions_T.repeat(num_frames), num_heads, num_kv_heads, eps
    )
    cache[:, first : first + num_new] = kv_Nkd.unflatten(0, (num_frames, num_new))
    keys, values = cache[:, : first + num_new].transpose(1, 2).split(num_kv_heads, 1)
    # the rows of a key/value head: its query heads at each new position
    q_Skrd = q_Nhd.view(num_frames, num_new, num_kv_heads, -1, dim).transpose(1, 2).flatten(2, 3)
    seen_rL = None
    if num_new > 1:
        seen_TL = torch.arange(first + num_new, device=qkv.device) <= positions_T[:, None]
        seen_rL = seen_TL.repeat_interleave(num_heads // num_kv_heads, 0)
    out_Skrd = F.scaled_dot_product_attention(q_Skrd, keys, values, attn_mask=seen_rL, scale=scale)
    out_STkgd = out_Skrd.unflatten(2, (num_new, -1)).transpose(1, 2)
    return out_STkgd.reshape(len(qkv), num_heads * dim)


@attend_frame.register_kernel("cuda")
def _attend_frame_on_gpu(
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
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.frame_attention_triton import launch_attend_frame

    return launch_attend_frame(
        qkv, qk_norm_hd, rope, cache, first, num_heads, num_kv_heads, eps, scale
    )


@attend_frame.register_fake
def _attend_frame_shape(
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
    return qkv.new_empty(len(qkv), num_heads * cache.shape[-1])
