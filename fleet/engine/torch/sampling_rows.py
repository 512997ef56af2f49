"""Sampling in a decode step by tensor operations only: each row has its own parameters, and the
host takes no part.

`sampling.draw` is the slow twin. Legend: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from fleet.engine.torch.noise import gumbel_of_halves
from fleet.engine.torch.sampling import beyond_top_p
from fleet.engine.torch.step_inputs import DrawInputs


def draw_rows(logits_BV: Tensor, draws: DrawInputs, *, never_V: Tensor, ends_V: Tensor) -> Tensor:
    """Sample one token id per row (int64 [B]); -1 if the row's logits are not finite.

    Shapes: bool [V]: `never_V` marks ids that are never sampled, `ends_V` marks end tokens, which
    are not sampled in a row that bans its end.
    """
    logits_BV = logits_BV.float()
    is_finite_B = logits_BV.amax(-1).isfinite()
    logits_BV = _penalised(logits_BV, draws)
    refused_BV = never_V | (ends_V & (draws.bans_end > 0)) | _refused(draws, logits_BV.shape[-1])
    logits_BV = logits_BV.masked_fill(refused_BV, -torch.inf)
    noise_BV = gumbel_of_halves(
        draws.noise_low_BQ[:, 0], draws.noise_high_BQ[:, 0], logits_BV.shape[-1]
    )
    noisy_BV = keep_top_rows(logits_BV / draws.temperature, draws.top_k, draws.top_p) + noise_BV
    tokens_B = torch.where(draws.is_sampled > 0, noisy_BV, logits_BV).argmax(-1)
    return torch.where(is_finite_B, tokens_B, -1)


def _refused(draws: DrawInputs, num_ids: int) -> Tensor:
    """Return which ids the rule of each row does not allow: bool [B, V]."""
    ids_V = torch.arange(num_ids, device=draws.allowed_BW.device)
    bits_V = torch.bitwise_left_shift(1, ids_V % 8).to(torch.uint8)
    return draws.allowed_BW[:, ids_V // 8] & bits_V == 0


def _penalised(logits_BV: Tensor, draws: DrawInputs) -> Tensor:
    counts_BV = draws.counts_BV
    repeated_BV = torch.where(
        logits_BV < 0, logits_BV * draws.repetition, logits_BV / draws.repetition
    )
    logits_BV = torch.where(counts_BV >= 0, repeated_BV, logits_BV)
    return logits_BV - torch.where(counts_BV > 0, draws.frequency * counts_BV + draws.presence, 0.0)


def keep_top_rows(scaled_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor) -> Tensor:
    """Return the logits, with -inf for each id below the row's top-k and top-p cut. Token ids that
    tie with the lowest one above the cut are kept.

    `top_k_B1` is V in a row without top-k.
    """
    best_BV = scaled_BV.sort(-1, descending=True).values
    beyond_BV = torch.arange(scaled_BV.shape[-1], device=scaled_BV.device) >= top_k_B1
    within_BV = best_BV.masked_fill(beyond_BV, -torch.inf)
    beyond_BV = beyond_BV | (beyond_top_p(within_BV, top_p_B1) & (top_p_B1 < 1.0))
    floor_B1 = best_BV.masked_fill(beyond_BV, torch.inf).amin(-1, keepdim=True)
    return scaled_BV.masked_fill(scaled_BV < floor_B1, -torch.inf)
