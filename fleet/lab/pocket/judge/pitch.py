"""Pitch errors of an answer against the teacher's speech.

The teacher's speech is put on the frame grid word by word, as in training. Answer and teacher are
aligned by dynamic time warping of their 48 mel bands (ln of power, each band minus its mean), which
does not depend on pitch. Every voiced hop of the answer that is aligned with a voiced hop of the
teacher counts once.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.judge.align import align
from fleet.lab.pocket.speech.analysis import NUM_FEATURES, NUM_MELS, Track
from fleet.lab.pocket.speech.wordlock import FRAME_S, HOPS_PER_FRAME, SentenceFrames

Errors = NDArray[np.float64]


def errors(answer: Track, teacher: SentenceFrames) -> Errors:
    """Return the errors in semitones, positive where the answer is higher, one for each hop that is
    voiced in both.
    """
    pairs = align(_shape(answer.features), _shape(teacher.features.reshape(-1, NUM_FEATURES)))
    teacher_hz = teacher.pitch_hz.reshape(-1).astype(np.float64)[pairs[:, 1]]
    both = answer.is_voiced[pairs[:, 0]] & (teacher_hz > 0)
    hops, first = np.unique(pairs[both, 0], return_index=True)
    return _semitones(answer.pitch_hz[hops], teacher_hz[both][first])


def carried_errors(teacher: SentenceFrames) -> Errors:
    """Return the errors of ideal codes, which come from rounding to whole glottal cycles a
    frame.
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
