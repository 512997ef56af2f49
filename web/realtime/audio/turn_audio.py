"""What the audio of a turn contains: speech, and silence at its end. Knows no turn."""

import numpy as np

from fleet.processing.speech_presence import has_speech
from fleet.processing.voice_activity import RATE_HZ
from fleet.processing.voice_onset import VoicedSearch
from web.http.offload import prepare_in_thread


async def is_speech(pcm: bytes) -> bool:
    """Return True if audio, PCM16 at 16 kHz, contains speech. Takes milliseconds."""
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32_768)
    return await prepare_in_thread(False, has_speech, samples, RATE_HZ)


def trailing_silence(pcm: bytes) -> int | None:
    """Count the samples after the last voiced sample; None if no sample is voiced."""
    backwards = np.frombuffer(pcm, "<i2")[::-1]
    search = VoicedSearch(RATE_HZ)
    for start in range(0, len(backwards), RATE_HZ):
        search.feed(backwards[start : start + RATE_HZ].tobytes())
    return search.floor if search.found else None
