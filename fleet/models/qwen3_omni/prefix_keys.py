"""Prefix cache keys of a prompt's positions. A text position is identified by its token id, an
audio position by the content of its clip, since all audio positions have the same id.

Legend: N positions, A audio positions among them, C clips.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.engine.torch.prefix import content_key


def prompt_keys(
    ids_N: NDArray[np.int32], at_audio_A: NDArray[np.int64], audio_A: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the prefix cache keys [N] of a prompt: `audio_A` at the positions `at_audio_A`, token
    ids elsewhere.
    """
    keys_N = ids_N.astype(np.int64)
    keys_N[at_audio_A] = audio_A
    return keys_N


def keys_of_clips(at_audio_A: NDArray[np.int64], clips_C: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the prefix cache keys [A] of audio positions, made from the clip, its number of
    positions (which depends on longer clips of the request), and the place in the clip.

    `at_audio_A`: audio positions of the prompt. `clips_C`: content hash of each clip. All clips are
    treated as one clip if their number is not the number of runs of adjacent audio positions.
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
