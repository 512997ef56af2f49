"""Keys that identify the rows of a prompt: ids of text, and contents of audio, whose positions all
have one id.

Legend: N positions, A audio positions among them, C clips.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.engine.torch.prefix import content_key


def prompt_keys(
    ids_N: NDArray[np.int32], at_audio_A: NDArray[np.int64], audio_A: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return keys of `Prefix` for a prompt whose positions `at_audio_A` have the keys `audio_A`."""
    keys_N = ids_N.astype(np.int64)
    keys_N[at_audio_A] = audio_A
    return keys_N


def keys_of_clips(at_audio_A: NDArray[np.int64], clips_C: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return keys of audio positions: clip, its number of positions (which depends on longer clips
    beside it), and the place in it.

    Clips that touch, or have no position, count as one clip.
    """
    runs = np.split(at_audio_A, np.flatnonzero(np.diff(at_audio_A) > 1) + 1)
    if len(runs) != len(clips_C):
        runs, clips_C = [at_audio_A], np.array([content_key(clips_C.tobytes())], np.int64)
    places = [
        (clip, len(run), place)
        for run, clip in zip(runs, clips_C.tolist(), strict=True)
        for place in range(len(run))
    ]
    return np.array(
        [content_key(np.array(place, np.int64).tobytes()) for place in places], np.int64
    )
