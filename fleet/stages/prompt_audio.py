"""The samples of a prompt's audio clips, from the blob that a worker receives with a task."""

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput
from fleet.core.request import RequestSpec


def cut_clips(spec: RequestSpec, blob: bytes | None) -> list[NDArray[np.float32]]:
    """Return the samples of each clip. Raises: BadInput if the blob is too short."""
    samples = np.frombuffer(blob or b"", dtype="<f4")
    if any(clip.offset_samples + clip.num_samples > len(samples) for clip in spec.audio):
        raise BadInput(
            f"audio: the request's clips need more samples than the {len(samples)} received",
            param="messages",
        )
    return [
        samples[clip.offset_samples : clip.offset_samples + clip.num_samples] for clip in spec.audio
    ]
