"""Audio clips of a chat request, decoded and joined as a request carries them. Knows no model."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from fleet.core.request import AudioClip
from fleet.processing.audio import Samples, decode_parts
from fleet.processing.base import ChatRequest


def decode_clips(chat: ChatRequest, *, rate_hz: int, max_audio_s: float) -> list[Samples]:
    """Return the samples of each audio part of a chat, in order; decode those that are not decoded
    yet. Raises: BadInput, InputTooLarge naming the field.
    """
    files = [
        (part.where, part.data)
        for part in chat.audio_parts
        if not isinstance(part.data, np.ndarray)
    ]
    decoded = iter(decode_parts(files, rate_hz=rate_hz, max_audio_s=max_audio_s))
    return [
        part.data if isinstance(part.data, np.ndarray) else next(decoded)
        for part in chat.audio_parts
    ]


def clip_table(clips: Sequence[Samples], rate_hz: int) -> tuple[AudioClip, ...]:
    """Return the places of clips in the request's blob."""
    lengths = [len(clip) for clip in clips]
    return tuple(
        AudioClip(offset_samples=end - length, num_samples=length, rate_hz=rate_hz)
        for end, length in zip(accumulate(lengths), lengths, strict=True)
    )


def clip_blob(clips: Sequence[Samples]) -> bytes | None:
    """Return the samples of all clips as the request's blob; None without clips."""
    return np.concatenate(clips).astype("<f4").tobytes() if clips else None
