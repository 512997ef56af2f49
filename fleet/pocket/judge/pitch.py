"""How far an answer's melody is from the teacher's.

The teacher's speech is taken as it is taught: put on the frame grid word by word. Answer and teacher are then aligned by
dynamic time warping of their 48 mel bands (ln of power, each band around its mean), so that pitch itself has no say in it.
Every voiced hop of the answer that falls on a voiced hop of the teacher's counts once. Knows no text.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.pocket.judge.align import align
from fleet.pocket.speech.analysis import NUM_FEATURES, NUM_MELS, Track
from fleet.pocket.speech.wordlock import FRAME_S, HOPS_PER_FRAME, SentenceFrames

Errors = NDArray[np.float64]


def errors(answer: Track, teacher: SentenceFrames) -> Errors:
    """Semitones, positive where the answer is higher; one for each hop that both voice."""
    pairs = align(_shape(answer.features), _shape(teacher.features.reshape(-1, NUM_FEATURES)))
    wanted_hz = teacher.pitch_hz.reshape(-1).astype(np.float64)[pairs[:, 1]]
    both = answer.is_voiced[pairs[:, 0]] & (wanted_hz > 0)
    hops, first = np.unique(pairs[both, 0], return_index=True)
    return _semitones(answer.pitch_hz[hops], wanted_hz[both][first])


def carried_errors(teacher: SentenceFrames) -> Errors:
    """What whole glottal cycles a frame cannot say: the errors of perfect codes."""
    wanted_hz = teacher.pitch_hz.reshape(-1).astype(np.float64)
    carried_hz = np.repeat(teacher.cycles / FRAME_S, HOPS_PER_FRAME)
    is_voiced = wanted_hz > 0
    return _semitones(carried_hz[is_voiced], wanted_hz[is_voiced])


def within(found: Errors, semitones: float = 1.0) -> float | None:
    return float((np.abs(found) <= semitones).mean()) if len(found) else None


def _semitones(hz: NDArray[np.floating], wanted_hz: NDArray[np.floating]) -> Errors:
    return 12 * np.log2(hz.astype(np.float64) / wanted_hz)


def _shape(features: NDArray[np.floating]) -> NDArray[np.float32]:
    bands = features[:, :NUM_MELS].astype(np.float32)
    return bands - bands.mean(0)
