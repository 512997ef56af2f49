"""Attention of single rows over the pages of their requests, in two operations: the parts of each
context, and their join.

A context is divided into parts, which a GPU computes in parallel. The number of parts and their
limits depend on the context alone, so a row's bytes do not depend on other rows. Rows may have the
same pages, as the rows of a prompt have.
Legend: B rows, h query heads, k key/value heads, g = h / k, d head size, P pages of a request, C
parts of a context, L = P x page size.
"""

import torch
from torch import Tensor

NUM_PARTS = 16
"""Largest number of parts of a context. With it a Thinker's row (four key/value heads) takes half
of an H200's multiprocessors; not measured.
"""
BLOCK = 32
"""Number of positions that a kernel program reads per iteration of its loop. A part is a multiple
of it.
"""


def attend_in_place(
    q_Bhd: Tensor, kv: Tensor, pages_BP: Tensor, positions_B: Tensor, page_size: int, scale: float
) -> Tensor:
    """Compute attention from each row to the positions up to its own, `positions_B`, which are
    stored in its pages. Returns [B, h x d].

    Shapes: `kv` is [slots, 2 x k, d], keys first; `pages_BP` int32; rows of `q_Bhd` may be further
    apart than their size, as may be the numbers of `positions_B`.
    """
    outs, weights = attend_parts(q_Bhd, kv, pages_BP, positions_B, page_size, scale)
    return join_parts(outs, weights, q_Bhd.dtype)


@torch.library.custom_op("fleet::attend_parts", mutates_args=(), device_types="cpu")
def attend_parts(
    q_Bhd: Tensor, kv: Tensor, pages_BP: Tensor, positions_B: Tensor, page_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return each part's attention output, and the logarithm of the part's sum of exponentials:
    float32 [B, h, C, d] and [B, h, C].

    An empty part has the logarithm -inf, and any output. Slow twin of `attend_each_part`.
    """
    num_rows, num_heads, dim = q_Bhd.shape
    offsets = torch.arange(page_size, device=kv.device)
    slots_BL = (pages_BP[:, :, None].long() * page_size + offsets).flatten(1)
    k_BkLd, v_BkLd = kv[slots_BL].unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q_Bkgd = q_Bhd.unflatten(1, (k_BkLd.shape[1], -1))
    scores_BkgL = q_Bkgd.float() @ k_BkLd.float().mT * scale
    is_in_BCL = _is_in_part(positions_B, slots_BL.shape[1])[:, None, None]
    scores_BkgCL = scores_BkgL[:, :, :, None].masked_fill(~is_in_BCL, -torch.inf)
    highest_BkgC1 = scores_BkgCL.amax(-1, keepdim=True)
    exps_BkgCL = (scores_BkgCL - highest_BkgC1).exp().masked_fill(~is_in_BCL, 0.0)
    total_BkgC1 = exps_BkgCL.sum(-1, keepdim=True)
    sums_BkgCd = exps_BkgCL.to(kv.dtype).float() @ v_BkLd.float()[:, :, None]
    outs = (sums_BkgCd / total_BkgC1).masked_fill(total_BkgC1 == 0, 0.0)
    weights = highest_BkgC1 + total_BkgC1.log()
    return outs.view(num_rows, num_heads, -1, dim), weights.view(num_rows, num_heads, -1)


def _is_in_part(positions_B: Tensor, num_positions: int) -> Tensor:
    """Return True for each position of a row's context in the part that contains it: [B, C, L]."""
    contexts_B1 = positions_B[:, None] + 1
    blocks_B1 = (contexts_B1 + BLOCK - 1) // BLOCK
    sizes_B1 = (blocks_B1 + NUM_PARTS - 1) // NUM_PARTS * BLOCK
    at_L = torch.arange(num_positions, device=positions_B.device)
    parts_C1 = torch.arange(NUM_PARTS, device=positions_B.device)[:, None]
    is_seen_BL = at_L < contexts_B1
    return ((at_L // sizes_B1)[:, None] == parts_C1) & is_seen_BL[:, None]


@attend_parts.register_kernel("cuda")
def _attend_parts_on_gpu(
    q_Bhd: Tensor, kv: Tensor, pages_BP: Tensor, positions_B: Tensor, page_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.paged_attention_triton import launch_attend_parts

    return launch_attend_parts(q_Bhd, kv, pages_BP, positions_B, page_size, scale, NUM_PARTS, BLOCK)


@attend_parts.register_fake
def _attend_parts_shape(
    q_Bhd: Tensor, kv: Tensor, pages_BP: Tensor, positions_B: Tensor, page_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, dim = q_Bhd.shape
    outs = q_Bhd.new_empty(num_rows, num_heads, NUM_PARTS, dim, dtype=torch.float32)
    return outs, outs.new_empty(num_rows, num_heads, NUM_PARTS)


@torch.library.custom_op("fleet::join_parts", mutates_args=(), device_types="cpu")
def join_parts(outs_BhCd: Tensor, weights_BhC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the outputs of the parts, weighted by their shares of the softmax: [B, h x d] in
    `dtype`.

    Outputs of parts whose weight is -inf are not used. Slow twin of `join_each_head`.
    """
    used = outs_BhCd.masked_fill(weights_BhC.isneginf()[..., None], 0.0)
    joined = weights_BhC.softmax(-1)[:, :, None] @ used
    return joined.flatten(1).to(dtype)


@join_parts.register_kernel("cuda")
def _join_parts_on_gpu(outs_BhCd: Tensor, weights_BhC: Tensor, dtype: torch.dtype) -> Tensor:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.paged_attention_triton import launch_join_parts

    return launch_join_parts(outs_BhCd, weights_BhC, dtype)


@join_parts.register_fake
def _join_parts_shape(outs_BhCd: Tensor, weights_BhC: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, num_heads, _, dim = outs_BhCd.shape
    return outs_BhCd.new_empty(num_rows, num_heads * dim, dtype=dtype)
