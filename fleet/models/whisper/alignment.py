"""Times of a transcript's tokens, from the attention of chosen heads to the audio, by dynamic time
warping.

Source: transformers 5.23, models/whisper/generation_whisper.py (`_extract_token_timestamps`,
`_median_filter`, `_dynamic_time_warping`).
Legend: H heads, N tokens, A audio positions.
"""

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_BOTH, _NEXT_TOKEN, _NEXT_POSITION = 0, 1, 2
"""Steps of a path: to the next token and position, to the next token, to the next position."""


PREDICTED_SHARE = 0.4
"""Weight of the predicting row in the place at which a token begins; the token's own row has the
rest. The predicting row, which precedes the token, finds the beginnings of words too early (135 ms
on average), since the attention moves on as soon as a token is certain. The token's own row finds
the beginnings too late (126 ms). The two errors are smaller for shorter words; `word_times.py`
corrects what is left.
"""


def token_begins(weights_HNA: Tensor, filter_width: int) -> NDArray[np.float64]:
    """Return the audio position at which each token begins: float64 [N - 1], ascending.
    `weights_HNA`: attention of N rows, which are the row that predicts the first token, and then
    the own row of each of the N - 1 tokens.
    """
    predicting = token_positions(weights_HNA[:, :-1], filter_width)
    own = token_positions(weights_HNA[:, 1:], filter_width)
    return PREDICTED_SHARE * predicting + (1 - PREDICTED_SHARE) * own


def token_positions(weights_HNA: Tensor, filter_width: int) -> NDArray[np.int64]:
    """Return the first audio position that each token is aligned with: int64 [N], ascending.
    `weights_HNA`: attention of one row per token to the positions that hold audio.
    """
    num_tokens = weights_HNA.shape[1]
    if num_tokens < 2 or not weights_HNA.shape[2]:
        return np.zeros(num_tokens, np.int64)
    mean = weights_HNA.mean(dim=1, keepdim=True)
    std = weights_HNA.std(dim=1, keepdim=True, unbiased=False)
    normal_HNA = median_filter((weights_HNA - mean) / std, filter_width)
    return warp(-normal_HNA.mean(dim=0).double().cpu().numpy())


def median_filter(values: Tensor, width: int) -> Tensor:
    """Return the medians of `width` neighbours along the last dimension, mirrored at its ends.
    Values are returned unchanged if that dimension has at most `width // 2` values.
    """
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = F.pad(values, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., half]


def warp(cost_NA: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the position at which the cheapest path through `cost_NA` reaches each token.

    Computed by anti-diagonals, each from the two before it. Sums are kept in float32, as in the
    source, so that ties are decided alike.
    """
    num_tokens, num_positions = cost_NA.shape
    steps = np.zeros((num_tokens + num_positions + 1, num_tokens + 1), np.int8)
    before = np.full(num_tokens + 1, np.inf, np.float32)
    last = before.copy()
    before[0] = 0.0
    for diagonal in range(2, num_tokens + num_positions + 1):
        first, end = max(1, diagonal - num_positions), min(num_tokens, diagonal - 1) + 1
        both, token, position = (
            before[first - 1 : end - 1],
            last[first - 1 : end - 1],
            last[first:end],
        )
        is_both = (both < token) & (both < position)
        is_token = ~is_both & (token < both) & (token < position)
        sums = np.where(is_both, both, np.where(is_token, token, position)).astype(np.float64)
        rows = np.arange(first - 1, end - 1)
        sums += cost_NA[rows, diagonal - 2 - rows]
        steps[diagonal, first:end] = np.where(is_both, _BOTH, np.where(is_token, _NEXT_TOKEN, 2))
        current = np.full(num_tokens + 1, np.inf, np.float32)
        current[first:end] = sums
        before, last = last, current
    return _reached(steps, num_tokens, num_positions)


def _reached(steps: NDArray[np.int8], num_tokens: int, num_positions: int) -> NDArray[np.int64]:
    reached = np.zeros(num_tokens, np.int64)
    token, position = num_tokens, num_positions
    while token > 0 and position > 0:
        reached[token - 1] = position - 1
        step = steps[token + position, token]
        token -= step != _NEXT_POSITION
        position -= step != _NEXT_TOKEN
    return reached
