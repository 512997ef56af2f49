"""Pitch errors of a spoken answer, compared with the teacher's speech of the same text.

The teacher's speech is put on the frame grid word by word, as in training. Answer and teacher are
aligned by dynamic time warping of their 48 mel bands (ln of power, each band minus its mean), which
does not depend on pitch. Every voiced hop (10 ms) of the answer that is aligned with a voiced hop
of the teacher counts once.
Source: Sakoe and Chiba 1978, symmetric, without slope constraint.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.speech.analysis import NUM_FEATURES, NUM_MELS, Track
from fleet.lab.pocket.speech.wordlock import FRAME_S, HOPS_PER_FRAME, SentenceFrames

Errors = NDArray[np.float64]


def errors(answer: Track, teacher: SentenceFrames) -> Errors:
    """Return the pitch error in semitones, positive if the answer is higher, of each voiced hop of
    the answer that is aligned with a voiced hop of the teacher's speech (with the first, if
    several).
    """
    pairs = align(_shape(answer.features), _shape(teacher.features.reshape(-1, NUM_FEATURES)))
    teacher_hz = teacher.pitch_hz.reshape(-1).astype(np.float64)[pairs[:, 1]]
    both = answer.is_voiced[pairs[:, 0]] & (teacher_hz > 0)
    hops, first = np.unique(pairs[both, 0], return_index=True)
    return _semitones(answer.pitch_hz[hops], teacher_hz[both][first])


def carried_errors(teacher: SentenceFrames) -> Errors:
    """Return the pitch errors that even ideal codes have, since the pitch is rounded to whole
    glottal cycles per frame.
    """
    teacher_hz = teacher.pitch_hz.reshape(-1).astype(np.float64)
    coded_hz = np.repeat(teacher.cycles / FRAME_S, HOPS_PER_FRAME)
    is_voiced = teacher_hz > 0
    return _semitones(coded_hz[is_voiced], teacher_hz[is_voiced])


def within(found: Errors, semitones: float = 1.0) -> float | None:
    return float((np.abs(found) <= semitones).mean()) if len(found) else None


def _semitones(hz: NDArray[np.floating], teacher_hz: NDArray[np.floating]) -> Errors:
    return 12 * np.log2(hz.astype(np.float64) / teacher_hz)


def _shape(features: NDArray[np.floating]) -> NDArray[np.float32]:
    bands = features[:, :NUM_MELS].astype(np.float32)
    return bands - bands.mean(0)


_STEPS = np.array([(1, 1), (1, 0), (0, 1)])
STRAIGHT_BONUS = 0.9
"""Factor on the cost of a diagonal step, which replaces two steps, so that the alignment leaves the
diagonal only where the features require it.
"""


def align(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.intp]:
    """Align two feature sequences `first` [N, D] and `second` [M, D] by dynamic time warping;
    return pairs of row indices [P, 2] from (0, 0) to (N-1, M-1).

    Invariants: N and M are positive; no index decreases, and from pair to pair at least one index
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
