"""From logits to the codes of one codebook and their embeddings, as one operation.

Legend: S frames, V codebook size, H hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.noise import gumbel_of_halves
from fleet.engine.torch.sampling import keep_top_alike


@torch.library.custom_op("fleet::draw_codes", mutates_args=(), device_types="cpu")
def draw_codes(
    logits_SV: Tensor,
    low_S: Tensor,
    high_S: Tensor,
    is_sampled_S: Tensor,
    embedding_VH: Tensor,
    sum_SH: Tensor,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a code per frame. Return the codes, int64 [S], their embeddings [S, H], and the sums
    `sum_SH` + embedding, [S, H].

    `low_S`, `high_S`: halves of the noise keys, int64, in [0, 2**32). `is_sampled_S`: integers, 0
    for greedy frames, which have neither noise nor cuts. `top_k` 0 and `top_p` 1 cut nothing. The
    lowest code wins a tie. Logits are finite or -inf. Numbers of keys and `is_sampled_S` may be
    apart.
    Slow twin of `draw_each_code`.
    """
    logits_SV = logits_SV.float()
    noisy_SV = keep_top_alike(logits_SV, top_k, top_p) + gumbel_of_halves(
        low_S, high_S, logits_SV.shape[1]
    )
    codes_S = torch.where(is_sampled_S[:, None] != 0, noisy_SV, logits_SV).argmax(-1)
    row_SH = F.embedding(codes_S, embedding_VH)
    return codes_S, row_SH, sum_SH + row_SH


@draw_codes.register_kernel("cuda")
def _draw_codes_on_gpu(
    logits_SV: Tensor,
    low_S: Tensor,
    high_S: Tensor,
    is_sampled_S: Tensor,
    embedding_VH: Tensor,
    sum_SH: Tensor,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.kernels.draw_codes_triton import launch_draw_codes

    return launch_draw_codes(
        logits_SV, low_S, high_S, is_sampled_S, embedding_VH, sum_SH, top_k, top_p
    )


@draw_codes.register_fake
def _draw_codes_shape(
    logits_SV: Tensor,
    low_S: Tensor,
    high_S: Tensor,
    is_sampled_S: Tensor,
    embedding_VH: Tensor,
    sum_SH: Tensor,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    codes_S = logits_SV.new_empty(len(logits_SV), dtype=torch.int64)
    row_SH = embedding_VH.new_empty(sum_SH.shape)
    return codes_S, row_SH, torch.empty_like(sum_SH)
