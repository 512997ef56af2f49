"""Reproducible speech of the teacher, for the evaluation.

espeak-ng carries its phase from text to text, so a fresh process synthesizes each list: equal lists
give equal samples.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from fleet.lab.pocket.teacher import SynthesizedSpeech, Teacher, Voice

Line = tuple[str, Voice]


def speak_all(lines: Sequence[Line]) -> list[SynthesizedSpeech]:
    """Synthesize the lines in their order, in a fresh process. Raises: ConfigError if espeak-ng is
    missing.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_speak, list(lines)).result()


def _speak(lines: Sequence[Line]) -> list[SynthesizedSpeech]:
    teacher = Teacher()
    return [teacher.speak(text, voice) for text, voice in lines]
