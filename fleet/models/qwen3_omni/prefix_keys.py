"""What tells the rows of a prompt apart: the ids of text, and for audio positions, whose ids are all one, what was heard.

Legend: N positions, A audio positions among them, C clips.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.engine.torch.prefix import content_key


def prompt_keys(ids_N: NDArray[np.int32], at_audio_A: NDArray[np.int64], audio_A: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys of `Prefix` for a prompt whose positions `at_audio_A` have the keys `audio_A`."""
    keys_N = ids_N.astype(np.int64)
    keys_N[at_audio_A] = audio_A
    return keys_N


def keys_of_clips(at_audio_A: NDArray[np.int64], clips_C: NDArray[np.int64]) -> NDArray[np.int64]:
    """A position by its clip, how many positions that has, and its place among them: a clip that is given another number of
    positions beside a longer one is another clip.

    Clips that touch, or have no position, are one clip together.
    """
    runs = np.split(at_audio_A, np.flatnonzero(np.diff(at_audio_A) > 1) + 1)
    if len(runs) != len(clips_C):
        runs, clips_C = [at_audio_A], np.array([content_key(clips_C.tobytes())], np.int64)
    places = [(clip, len(run), place) for run, clip in zip(runs, clips_C.tolist(), strict=True) for place in range(len(run))]
    return np.array([content_key(np.array(place, np.int64).tobytes()) for place in places], np.int64)
