"""Alignment of two utterances of the same words by dynamic time warping over feature rows.

Source: Sakoe and Chiba 1978, symmetric, without slope constraint.
"""

import numpy as np
from numpy.typing import NDArray

_STEPS = np.array([(1, 1), (1, 0), (0, 1)])
STRAIGHT_BONUS = 0.9
"""Factor on the cost of a diagonal step, which replaces two steps: rates differ only where the
features require it.
"""


def align(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return [P, 2] pairs of rows of `first` [N, D] and `second` [M, D], from (0, 0) to (N-1, M-1).

    Invariants: N and M are positive; no index decreases, and from pair to pair at least one of them
    increases by 1.
    """
    cost = _distances(first.astype(np.float64), second.astype(np.float64))
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    best_step = np.zeros((rows + 1, columns + 1), np.int8)
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        here = cost[row - 1, column - 1]
        costs = np.stack(
            [
                total[row - 1, column - 1] + 2 * STRAIGHT_BONUS * here,
                total[row - 1, column] + here,
                total[row, column - 1] + here,
            ]
        )
        best_step[row, column] = costs.argmin(0)
        total[row, column] = costs.min(0)
    return _path(best_step)


def _distances(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * first @ second.T
    return np.sqrt(np.maximum(squares, 0))


def _path(best_step: NDArray[np.int8]) -> NDArray[np.intp]:
    at = np.array(best_step.shape) - 1
    path = [at]
    while at.max() > 1:
        at = at - _STEPS[best_step[tuple(at)]]
        path.append(at)
    return np.array(path[::-1]) - 1
