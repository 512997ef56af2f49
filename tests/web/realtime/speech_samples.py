"""Speech (by espeak-ng) and silence for tests, as PCM16 at 24 kHz."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.judge.questions import speak_all
from fleet.lab.pocket.teacher import Voice

RATE_HZ = 24_000
QUESTION = "what day comes after monday"


@cache
def speech(text: str) -> bytes:
    (spoken,) = speak_all([(text, Voice())])
    samples = np.asarray(spoken.samples, np.float32)
    return (
        (np.clip(samples / max(1e-6, float(np.abs(samples).max())), -1, 1) * 20_000)
        .astype("<i2")
        .tobytes()
    )


def question() -> bytes:
    """Return a spoken question between silences, which the gateway detects as one user turn."""
    return silence(300) + speech(QUESTION) + silence(800)


def silence(ms: int) -> bytes:
    return bytes(2 * RATE_HZ * ms // 1000)


def blocks(pcm: bytes, ms: int = 20) -> list[bytes]:
    size = 2 * RATE_HZ * ms // 1000
    return [pcm[start : start + size] for start in range(0, len(pcm), size)]


def spoken(num_samples: int) -> NDArray[np.int16]:
    """Return the spoken question, repeated up to `num_samples` samples."""
    return np.resize(np.frombuffer(speech(QUESTION), "<i2"), num_samples)
