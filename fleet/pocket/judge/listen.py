"""The ear of the judge: a spoken answer beside the teacher's speech of the same text. Several processes listen at a time.

Knows no API and no question.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from fleet.pocket.judge import pitch
from fleet.pocket.judge.grammar import says
from fleet.pocket.judge.recognise import Kind, Recogniser
from fleet.pocket.speech.analysis import analyse
from fleet.pocket.speech.wordlock import SILENT_AFTER, SILENT_BEFORE, SentenceFrames, lock, speech_end_s
from fleet.pocket.teacher import SAMPLE_RATE_HZ, SynthesizedSpeech

Samples = NDArray[np.float32]
HOP_SAMPLES = SAMPLE_RATE_HZ // 100
AUDIBLE, AUDIBLE_PART = 1e-3, 0.01
"""Of full scale, and of the loudest 10 ms: what is softer is silence around the speech."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An answer, and what the teacher says of it. `floor`: the teacher is to be recognised as well."""

    text: str
    voice: str
    samples: Samples
    teacher: SynthesizedSpeech
    floor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Listened:
    """Units: lengths without the silence around, `lead_s` of it before; pitch errors in semitones by hop."""

    heard: dict[str, str]
    teacher_heard: dict[str, str]
    lead_s: float
    length_s: float
    teacher_length_s: float
    pitch_errors: NDArray[np.float64]
    carried_errors: NDArray[np.float64]


def listen_all(answers: Sequence[Spoken], workers: int, advance: Callable[[], None]) -> list[Listened]:
    """In the order of the answers. One worker is this process itself."""
    found: list[Listened] = []
    for listened in _listened(answers, workers):
        found.append(listened)
        advance()
    return found


def _listened(answers: Sequence[Spoken], workers: int) -> Iterator[Listened]:
    if workers == 1:
        yield from map(listen, answers)
        return
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(listen, answers)


def listen(answer: Spoken) -> Listened:
    spoken, teachers = extent(answer.samples), extent(answer.teacher.samples)
    ours = answer.samples[spoken]
    locked = _locked(answer)
    return Listened(
        heard=_heard(answer.text, answer.voice, ours),
        teacher_heard=_heard(answer.text, answer.voice, answer.teacher.samples[teachers]) if answer.floor else {},
        lead_s=spoken.start / SAMPLE_RATE_HZ,
        length_s=len(ours) / SAMPLE_RATE_HZ,
        teacher_length_s=(teachers.stop - teachers.start) / SAMPLE_RATE_HZ,
        pitch_errors=pitch.errors(analyse(ours), locked) if len(ours) else np.zeros(0),
        carried_errors=pitch.carried_errors(locked),
    )


def extent(samples: Samples) -> slice:
    """From the first to the last audible 10 ms; nothing where all is silent."""
    hops = samples[: len(samples) // HOP_SAMPLES * HOP_SAMPLES].reshape(-1, HOP_SAMPLES)
    level = np.sqrt((hops.astype(np.float64) ** 2).mean(1))
    audible = np.flatnonzero(level > max(AUDIBLE, AUDIBLE_PART * level.max(initial=0)))
    if not len(audible):
        return slice(0, 0)
    return slice(int(audible[0]) * HOP_SAMPLES, (int(audible[-1]) + 1) * HOP_SAMPLES)


def _locked(answer: Spoken) -> SentenceFrames:
    """The teacher's speech on the frame grid, without the silence around."""
    speech = answer.teacher
    end_s = speech_end_s(speech.samples, SAMPLE_RATE_HZ)
    frames = lock(analyse(speech.samples), answer.text, speech.word_starts_s, end_s)
    words = slice(SILENT_BEFORE, len(frames.cycles) - SILENT_AFTER)
    return SentenceFrames(
        features=frames.features[words],
        pitch_hz=frames.pitch_hz[words],
        cycles=frames.cycles[words],
        pointer=frames.pointer[words],
    )


def _heard(text: str, voice: str, samples: Samples) -> dict[str, str]:
    kinds: tuple[Kind, ...] = ("bigram", "grammar") if says(text) else ("bigram",)
    return {kind: _recogniser(kind).words(samples, SAMPLE_RATE_HZ, voice) if len(samples) else "" for kind in kinds}


@cache
def _recogniser(kind: Kind) -> Recogniser:
    return Recogniser(kind)
