"""Evaluation of spoken answers: WER, missing ends, and length and pitch against the teacher's
speech.

Transcripts are compared with the answer's own text, by pronunciation: a wrong answer, or another
spelling of the same pronunciation, is no error of the speech.
"""

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import jiwer
import numpy as np
import soundfile

from fleet.lab.pocket.corpus import Dialogue, spoken
from fleet.lab.pocket.judge.ask import MAX_ANSWER_S, ChatReply, JudgeClient, typed
from fleet.lab.pocket.judge.language import can_produce
from fleet.lab.pocket.judge.listen import SpeechMeasures, SpokenReply, listen_all
from fleet.lab.pocket.judge.options import COMMAND, JudgeOptions
from fleet.lab.pocket.judge.pitch import within
from fleet.lab.pocket.judge.questions import distinct, speak_all
from fleet.lab.pocket.judge.report import Figure, Histogram, JudgedSpeech, JudgeReport, share
from fleet.lab.pocket.judge.words import MISSING, alike, by_pronunciation, known_words, unsayable
from fleet.lab.pocket.shape import VOICES
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ
from fleet.lab.report.progress import progress_bar

LENGTH_TOLERANCE = 0.15
ENDLESS_RATIO, ENDLESS_S = 2.0, 1.0
"""An answer longer than `ENDLESS_RATIO` times the teacher's length plus `ENDLESS_S` counts as an
answer without end.
"""
HISTOGRAM_SEMITONES, BIN_SEMITONES = 6.0, 0.25
_figure = partial(Figure, "speech_out")

SpeechOutResult = tuple[tuple[Figure, ...], tuple[JudgedSpeech, ...], Histogram]


def judge(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    dialogues = distinct(options.speech_out, options.seed)
    voices = [voice for voice, _ in zip(cycle(sorted(VOICES)), dialogues, strict=False)]
    with progress_bar(COMMAND, "spoken answers", len(dialogues)) as advance:
        questions = [
            typed(dialogue, voice) for dialogue, voice in zip(dialogues, voices, strict=True)
        ]
        replies = client.ask_all(questions, options.concurrency, advance)
    if options.sounds is not None:
        _save(options.sounds, voices, replies)
    figures, judged, errors = listen_to(dialogues, voices, replies, options)
    lacking = tuple(word for word in known_words() if word in MISSING or unsayable([word]))
    return report.adding(
        figures, speech_out=judged, pitch_errors=errors, lacking=lacking, alike=alike()
    )


def listen_to(
    dialogues: Sequence[Dialogue],
    voices: Sequence[str],
    replies: Sequence[ChatReply],
    options: JudgeOptions,
) -> SpeechOutResult:
    texts = [spoken(reply.text) for reply in replies]
    indices = [index for index, text in enumerate(texts) if text]
    teachers = speak_all([(texts[index], VOICES[voices[index]]) for index in indices])
    answers = [
        SpokenReply(
            text=texts[index],
            voice=voices[index],
            samples=replies[index].samples,
            teacher=teacher,
            floor=options.floor,
        )
        for index, teacher in zip(indices, teachers, strict=True)
    ]
    with progress_bar(COMMAND, "listening", len(answers)) as advance:
        measures = listen_all(answers, options.workers, advance)
    judged = [
        _judged(dialogues[index], voices[index], texts[index], replies[index], each)
        for index, each in zip(indices, measures, strict=True)
    ]
    failed = len(dialogues) - sum(each.ends and each.length_s > 0 for each in judged)
    return _figures(judged, measures, len(dialogues), failed), tuple(judged), _histogram(measures)


def _judged(
    dialogue: Dialogue, voice: str, text: str, reply: ChatReply, measures: SpeechMeasures
) -> JudgedSpeech:
    length_s = len(reply.samples) / SAMPLE_RATE_HZ
    bound_s = min(MAX_ANSWER_S, ENDLESS_RATIO * measures.teacher_length_s + ENDLESS_S)
    return JudgedSpeech(
        family=dialogue.family,
        voice=voice,
        text=text,
        ends=reply.finish_reason == "stop" and length_s < bound_s,
        lead_s=measures.lead_s,
        length_s=measures.length_s,
        teacher_length_s=measures.teacher_length_s,
        heard=measures.heard,
        teacher_heard=measures.teacher_heard,
        pitch_within=within(measures.pitch_errors),
        pitch_carried=within(measures.carried_errors),
    )


def _figures(
    judged: Sequence[JudgedSpeech], measures: Sequence[SpeechMeasures], count: int, failed: int
) -> tuple[Figure, ...]:
    errors = _joined([each.pitch_errors for each in measures])
    carried = _joined([each.carried_errors for each in measures])
    return (
        *_wer_figures(judged),
        _figure(
            "answers without end or sound", float(failed), count, unit="", target=0, at_most=True
        ),
        *_length_figures([each for each in judged if each.length_s > 0]),
        _figure(
            "pitch within a semitone of the teacher's, of voiced hops",
            _percent(within(errors)),
            len(errors),
            target=90,
        ),
        _figure("pitch error, median", _median(np.abs(errors)), len(errors), unit="semitones"),
        *(_pitch_of(voice, judged, measures) for voice in sorted(VOICES)),
        _figure(
            "pitch within a semitone, of perfect codes", _percent(within(carried)), len(carried)
        ),
    )


def _wer_figures(judged: Sequence[JudgedSpeech]) -> list[Figure]:
    figures: list[Figure] = []
    for kind, target in (("bigram", 8.0), ("grammar", 3.0)):
        name, heard = f"WER, {kind}", _pairs(judged, kind)
        figures.append(_wer(name, heard, target))
        for voice in sorted(VOICES):
            of_voice = [each for each in judged if each.voice == voice]
            figures.append(_wer(f"{name}, {voice}", _pairs(of_voice, kind)))
        teacher = _pairs(judged, kind, by_teacher=True)
        figures.append(_wer(f"{name}, the teacher's own speech", teacher))
    of_tables = [each for each in judged if can_produce(each.text)]
    teacher = _pairs(of_tables, "bigram", by_teacher=True)
    return [
        *figures,
        _wer("WER, bigram, what the grammar can say", _pairs(of_tables, "bigram")),
        _wer("WER, bigram, the same by the teacher", teacher),
    ]


def _pairs(
    judged: Sequence[JudgedSpeech], kind: str, *, by_teacher: bool = False
) -> list[tuple[str, str]]:
    """Return the (text, transcript) pairs of the answers that have a transcript by the language
    model `kind`, with words of equal pronunciation made equal. `by_teacher`: use transcripts of the
    teacher's speech.
    """
    transcripts = [(each.text, each.teacher_heard if by_teacher else each.heard) for each in judged]
    return [
        (by_pronunciation(text), by_pronunciation(heard[kind]))
        for text, heard in transcripts
        if kind in heard
    ]


def _wer(name: str, pairs: Sequence[tuple[str, str]], target: float | None = None) -> Figure:
    texts, transcripts = [text for text, _ in pairs], [transcript for _, transcript in pairs]
    value = 100 * float(jiwer.wer(texts, transcripts)) if pairs else None
    return _figure(name, value, len(pairs), target=target, at_most=True)


def _length_figures(judged: Sequence[JudgedSpeech]) -> list[Figure]:
    off = np.array([abs(each.length_s / each.teacher_length_s - 1) for each in judged])
    near = share([bool(each <= LENGTH_TOLERANCE) for each in off])
    return [
        _figure(
            "length off the teacher's, median",
            _percent(_median(off)),
            len(off),
            target=100 * LENGTH_TOLERANCE,
            at_most=True,
        ),
        _figure("length within 15 % of the teacher's, of answers", near, len(off)),
        _figure(
            "silence before the speech, median",
            _median(np.array([each.lead_s for each in judged])),
            len(off),
            unit="s",
        ),
    ]


def _pitch_of(
    voice: str, judged: Sequence[JudgedSpeech], measures: Sequence[SpeechMeasures]
) -> Figure:
    errors = _joined(
        [
            each.pitch_errors
            for answer, each in zip(judged, measures, strict=True)
            if answer.voice == voice
        ]
    )
    return _figure(f"pitch within a semitone, {voice}", _percent(within(errors)), len(errors))


def _histogram(measures: Sequence[SpeechMeasures]) -> Histogram:
    edges = np.arange(-HISTOGRAM_SEMITONES, HISTOGRAM_SEMITONES + BIN_SEMITONES, BIN_SEMITONES)
    errors = np.clip(_joined([each.pitch_errors for each in measures]), edges[0], edges[-1])
    counts, _ = np.histogram(errors, edges)
    return Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def _save(folder: Path, voices: Sequence[str], replies: Sequence[ChatReply]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, (voice, reply) in enumerate(zip(voices, replies, strict=True)):
        name = "-".join(spoken(reply.text).split()[:8]) or "nothing"
        soundfile.write(
            folder / f"{index:04d}-{voice}-{name}.wav",
            reply.samples,
            SAMPLE_RATE_HZ,
            subtype="PCM_16",
        )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts])


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
