"""Measurement of spoken answers against the teacher's speech of the same text, in several
processes.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.judge import pitch
from fleet.lab.pocket.judge.language import can_produce
from fleet.lab.pocket.judge.recognise import Kind, Recogniser
from fleet.lab.pocket.speech.analysis import analyse
from fleet.lab.pocket.speech.wordlock import (
    SILENT_AFTER,
    SILENT_BEFORE,
    SentenceFrames,
    lock,
    speech_end_s,
)
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, SynthesizedSpeech

Samples = NDArray[np.float32]
HOP_SAMPLES = SAMPLE_RATE_HZ // 100
AUDIBLE, AUDIBLE_PART = 1e-3, 0.01
"""Silence thresholds, as a share of full scale and as a share of the loudest 10 ms; the larger one
applies.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenReply:
    """A spoken answer to measure, and the teacher's speech of its text. `floor`: whether to
    transcribe the teacher's speech, too, whose WER is the lowest to be expected.
    """

    text: str
    voice: str
    samples: Samples
    teacher: SynthesizedSpeech
    floor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechMeasures:
    """Measurements of one spoken answer.

    `heard` and `teacher_heard`: transcripts of the answer and of the teacher's speech, keyed by the
    recogniser's language model; `teacher_heard` is empty if not requested. `pitch_errors`: pitch
    errors of the answer; `carried_errors`: pitch errors of ideal codes.
    Units: lengths exclude the silence around the speech; `lead_s` is the silence before it; pitch
    errors in semitones, by hop.
    """

    heard: dict[str, str]
    teacher_heard: dict[str, str]
    lead_s: float
    length_s: float
    teacher_length_s: float
    pitch_errors: NDArray[np.float64]
    carried_errors: NDArray[np.float64]


def listen_all(
    answers: Sequence[SpokenReply], workers: int, advance: Callable[[], None]
) -> list[SpeechMeasures]:
    """Measure the answers in `workers` processes, or in this process if `workers` is 1; return the
    results in order.
    """
    measures: list[SpeechMeasures] = []
    for measured in _measure_all(answers, workers):
        measures.append(measured)
        advance()
    return measures


def _measure_all(answers: Sequence[SpokenReply], workers: int) -> Iterator[SpeechMeasures]:
    if workers == 1:
        yield from map(listen, answers)
        return
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(listen, answers)


def listen(answer: SpokenReply) -> SpeechMeasures:
    speech, teacher_speech = extent(answer.samples), extent(answer.teacher.samples)
    samples = answer.samples[speech]
    locked = _locked(answer)
    return SpeechMeasures(
        heard=_transcripts(answer.text, answer.voice, samples),
        teacher_heard=_transcripts(
            answer.text, answer.voice, answer.teacher.samples[teacher_speech]
        )
        if answer.floor
        else {},
        lead_s=speech.start / SAMPLE_RATE_HZ,
        length_s=len(samples) / SAMPLE_RATE_HZ,
        teacher_length_s=(teacher_speech.stop - teacher_speech.start) / SAMPLE_RATE_HZ,
        pitch_errors=pitch.errors(analyse(samples), locked) if len(samples) else np.zeros(0),
        carried_errors=pitch.carried_errors(locked),
    )


def extent(samples: Samples) -> slice:
    """Return the slice from the first to the last audible 10 ms, empty if all is silent."""
    hops = samples[: len(samples) // HOP_SAMPLES * HOP_SAMPLES].reshape(-1, HOP_SAMPLES)
    level = np.sqrt((hops.astype(np.float64) ** 2).mean(1))
    audible = np.flatnonzero(level > max(AUDIBLE, AUDIBLE_PART * level.max(initial=0)))
    if not len(audible):
        return slice(0, 0)
    return slice(int(audible[0]) * HOP_SAMPLES, (int(audible[-1]) + 1) * HOP_SAMPLES)


def _locked(answer: SpokenReply) -> SentenceFrames:
    """Return the teacher's speech of the answer on the frame grid, without the silence around
    it.
    """
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


def _transcripts(text: str, voice: str, samples: Samples) -> dict[str, str]:
    kinds: tuple[Kind, ...] = ("bigram", "grammar") if can_produce(text) else ("bigram",)
    return {
        kind: _recogniser(kind).words(samples, SAMPLE_RATE_HZ, voice) if len(samples) else ""
        for kind in kinds
    }


@cache
def _recogniser(kind: Kind) -> Recogniser:
    return Recogniser(kind)
