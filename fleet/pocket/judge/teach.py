"""The teacher's speech to compare with: every text in a fresh process, in the order given, so that the same list sounds the same.

espeak-ng carries its phase from text to text. Knows no model.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from fleet.pocket.teacher import SynthesizedSpeech, Teacher, Voice

Line = tuple[str, Voice]


def speak_all(lines: Sequence[Line]) -> list[SynthesizedSpeech]:
    """Raises: ConfigError where espeak-ng is missing."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_speak, list(lines)).result()


def _speak(lines: Sequence[Line]) -> list[SynthesizedSpeech]:
    teacher = Teacher()
    return [teacher.speak(text, voice) for text, voice in lines]
