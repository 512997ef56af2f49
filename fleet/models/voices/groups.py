"""Speech of a clause that may be too long for one run of a model, at any speed."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.models.voices.base import Speech
from fleet.models.voices.phonemes import groups
from fleet.models.voices.tempo import faster

SpeakGroup = Callable[[Sequence[str], float], tuple[NDArray[np.float32], NDArray[np.float64]]]
"""Function that speaks some words, given as phonemes, at a speed of at most 1. Returns the samples,
and the position in the samples at which each word ends.
"""


def speak_groups(words: Sequence[str], speed: float, rate_hz: int, speak: SpeakGroup) -> Speech:
    """Speak words, given as phonemes, in one or more runs of a model. `speed`: any speed;
    `rate_hz`: sample rate of the model.

    At speeds below 1 the model itself speaks more slowly. A speed above 1 is made by shortening
    samples at the same pitch, because the model's durations have a lower bound and would not shrink
    enough.
    """
    model_speed, factor = min(speed, 1.0), max(speed, 1.0)
    parts, ends, length = [np.zeros(0, np.float32)], [np.zeros(0)], 0
    for group in groups(words):
        samples, word_ends = speak(group, model_speed)
        parts.append(samples)
        ends.append(word_ends + length)
        length += len(samples)
    return Speech(
        samples=faster(np.concatenate(parts), rate_hz, factor),
        word_ends=np.rint(np.concatenate(ends) / factor).astype(np.int64),
    )
