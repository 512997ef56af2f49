"""Selection of held-out questions, without repetition and reproducible by seed, and the teacher's
speech of them.

espeak-ng carries the phase of its voice from text to text, so a fresh process synthesizes each
list: equal lists give equal samples.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from fleet.lab.pocket.corpus import ChatTurn, Dialogue, dialogues, families
from fleet.lab.pocket.teacher import SynthesizedSpeech, Teacher, Voice

_MOST_ROUNDS = 2_000
"""Largest number of dialogues drawn per family in the search for new questions. A family with few
held-out questions is exhausted before.
"""


def distinct(
    count: int, seed: int, wanted: Callable[[Dialogue], bool] = lambda _: True
) -> list[Dialogue]:
    """Return the first `count` different held-out dialogues for which `wanted` is True, or fewer if
    the search finds no more.
    """
    return list(islice(_distinct(seed, wanted), count))


def _distinct(seed: int, wanted: Callable[[Dialogue], bool]) -> Iterator[Dialogue]:
    seen: set[tuple[ChatTurn, ...]] = set()
    for dialogue in dialogues("held_out", _MOST_ROUNDS * len(families()), seed):
        if dialogue.turns not in seen and wanted(dialogue):
            seen.add(dialogue.turns)
            yield dialogue


Line = tuple[str, Voice]


def speak_all(lines: Sequence[Line]) -> list[SynthesizedSpeech]:
    """Synthesize texts in order, in a fresh process; return their speech. Raises: ConfigError if
    espeak-ng is missing.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_speak, list(lines)).result()


def _speak(lines: Sequence[Line]) -> list[SynthesizedSpeech]:
    teacher = Teacher()
    return [teacher.speak(text, voice) for text, voice in lines]
