"""Measurements of spoken answers with the real pocketsphinx, espeak-ng and WORLD detect wrong words
and wrong pitch.
"""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.lab.pocket.corpus import ChatTurn, Dialogue
from fleet.lab.pocket.judge import speech_out
from fleet.lab.pocket.judge.ask import ChatReply
from fleet.lab.pocket.judge.listen import extent
from fleet.lab.pocket.judge.options import JudgeOptions
from fleet.lab.pocket.judge.pitch import align, carried_errors, errors, within
from fleet.lab.pocket.judge.questions import speak_all
from fleet.lab.pocket.judge.recognise import Recogniser
from fleet.lab.pocket.judge.report import Figure
from fleet.lab.pocket.shape import VOICES
from fleet.lab.pocket.speech.analysis import Track, analyse
from fleet.lab.pocket.speech.wordlock import SentenceFrames, lock, speech_end_s
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, SynthesizedSpeech

pytestmark = pytest.mark.one_file_in(3, "making of Pocket")

TEXTS = (
    "the capital of sweden is stockholm",
    "twelve minus three is nine",
    "good morning to you too",
)
OTHERS = ("hello how can i help you", "a triangle has three sides")
SHORT = "nine"
OPTIONS = JudgeOptions(workers=1)
FiguresByName = dict[str, Figure]


@pytest.fixture(scope="module")
def speeches() -> dict[str, SynthesizedSpeech]:
    """Speech of the teacher model by text, with alternating voices."""
    texts = (*TEXTS, *OTHERS, SHORT)
    voices = sorted(VOICES)
    return dict(
        zip(
            texts,
            speak_all([(text, VOICES[voices[i % 2]]) for i, text in enumerate(texts)]),
            strict=True,
        )
    )


def _judged(
    texts: tuple[str, ...], samples: list[NDArray[np.float32]], reason: str = "stop"
) -> FiguresByName:
    dialogues = [
        Dialogue(
            turns=(ChatTurn(role="user", text="hello"), ChatTurn(role="assistant", text=text)),
            family="x",
        )
        for text in texts
    ]
    replies = [
        ChatReply(text=text, finish_reason=reason, samples=each)
        for text, each in zip(texts, samples, strict=True)
    ]
    voices = [sorted(VOICES)[index % 2] for index in range(len(texts))]
    figures, judged, _ = speech_out.listen_to(dialogues, voices, replies, OPTIONS)
    assert len(judged) == sum(bool(text) for text in texts)
    return {figure.name: figure for figure in figures}


def _value(figures: FiguresByName, name: str) -> float:
    value = figures[name].value
    assert value is not None, name
    return value


def test_teacher_speech_is_the_error_floor(speeches: dict[str, SynthesizedSpeech]) -> None:
    lead = np.zeros(4 * 1920, np.float32)
    figures = _judged(TEXTS, [np.concatenate([lead, speeches[text].samples]) for text in TEXTS])
    for kind in ("bigram", "grammar"):
        wer, floor = (
            _value(figures, f"WER, {kind}"),
            _value(figures, f"WER, {kind}, the teacher's own speech"),
        )
        assert wer <= floor + 8 and wer < 20, kind
    assert _value(figures, "length off the teacher's, median") < 3
    assert _value(figures, "pitch within a semitone of the teacher's, of voiced hops") > 90
    assert 80 < _value(figures, "pitch within a semitone, of perfect codes") <= 100
    assert _value(figures, "silence before the speech, median") == pytest.approx(
        len(lead) / SAMPLE_RATE_HZ, abs=0.1
    )
    assert _value(figures, "answers without end or sound") == 0


def test_wrong_words_raise_the_error_rate(speeches: dict[str, SynthesizedSpeech]) -> None:
    """Wrong words raise the error rate: the answers are clear speech in the right voice, but of
    other texts.
    """
    figures = _judged(TEXTS[:2], [speeches[text].samples for text in OTHERS])
    for kind in ("bigram", "grammar"):
        assert _value(figures, f"WER, {kind}") > 60
        assert figures[f"WER, {kind}"].met is False
        assert _value(figures, f"WER, {kind}, the teacher's own speech") < 30


def test_answer_without_end_or_audio_is_counted(speeches: dict[str, SynthesizedSpeech]) -> None:
    samples = speeches[SHORT].samples
    endless = np.tile(samples, 6)
    silent = np.zeros_like(samples)
    assert _value(_judged((SHORT, SHORT), [endless, silent]), "answers without end or sound") == 2
    assert _value(_judged((SHORT, ""), [samples, samples]), "answers without end or sound") == 1
    assert (
        _value(_judged((SHORT,), [samples], reason="length"), "answers without end or sound") == 1
    )


def test_recognition_is_independent_of_earlier_audio(
    speeches: dict[str, SynthesizedSpeech],
) -> None:
    recogniser = Recogniser("grammar")
    alone = recogniser.words(speeches[TEXTS[0]].samples, SAMPLE_RATE_HZ, "chelsie")
    assert alone == TEXTS[0]
    recogniser.words(100 * speeches[TEXTS[1]].samples, SAMPLE_RATE_HZ)
    assert recogniser.words(speeches[TEXTS[0]].samples, SAMPLE_RATE_HZ, "chelsie") == alone
    assert recogniser.words(np.zeros(SAMPLE_RATE_HZ, np.float32), SAMPLE_RATE_HZ) in ("", "c")


def _locked(text: str, speech: SynthesizedSpeech) -> tuple[Track, SentenceFrames]:
    track = analyse(speech.samples)
    return track, lock(
        track, text, speech.word_starts_s, speech_end_s(speech.samples, SAMPLE_RATE_HZ)
    )


def test_pitch_shift_is_measured(speeches: dict[str, SynthesizedSpeech]) -> None:
    track, frames = _locked(TEXTS[0], speeches[TEXTS[0]])
    shifted = replace(track, pitch_hz=track.pitch_hz * np.float32(2 ** (2 / 12)))
    assert float(np.median(errors(shifted, frames))) == pytest.approx(2, abs=0.05)
    assert (within(errors(track, frames)) or 0) > 0.95
    assert (within(errors(shifted, frames)) or 0) < 0.1


def test_pitch_measure_ignores_speech_rate(speeches: dict[str, SynthesizedSpeech]) -> None:
    track, frames = _locked(TEXTS[2], speeches[TEXTS[2]])
    slow = np.repeat(np.arange(len(track.pitch_hz)), 2)
    slower = Track(
        features=track.features[slow],
        pitch_hz=track.pitch_hz[slow],
        is_voiced=track.is_voiced[slow],
    )
    assert (within(errors(slower, frames)) or 0) > 0.9


def test_perfect_codes_have_rounding_error_only() -> None:
    frames = SentenceFrames(
        features=np.zeros((2, 8, 51), np.float16),
        pitch_hz=np.array([[125.0] * 8, [0.0] * 8], np.float16),
        cycles=np.array([10, 8], np.int16),
        pointer=np.zeros(2, np.int16),
    )
    assert carried_errors(frames) == pytest.approx(np.zeros(8))
    assert carried_errors(replace(frames, cycles=np.array([11, 8], np.int16))) == pytest.approx(
        [12 * np.log2(1.1)] * 8
    )


def test_alignment_finds_stretched_speech() -> None:
    rng = np.random.default_rng(0)
    first = rng.standard_normal((20, 5)).astype(np.float32)
    stretch = np.repeat(np.arange(20), rng.integers(1, 4, 20))
    pairs = align(first, first[stretch])
    assert (stretch[pairs[:, 1]] == pairs[:, 0]).all()
    assert pairs[0].tolist() == [0, 0] and pairs[-1].tolist() == [19, len(stretch) - 1]
    steps = np.diff(pairs, axis=0)
    assert ((steps >= 0) & (steps <= 1)).all() and (steps.sum(1) > 0).all()
    assert align(first[:1], first[:4]).tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]


def test_surrounding_silence_is_not_speech() -> None:
    tone = np.sin(np.arange(4800) / 10).astype(np.float32)
    quiet = np.full(2400, 1e-4, np.float32)
    assert extent(np.concatenate([quiet, tone, quiet, quiet])) == slice(2400, 7200)
    assert extent(quiet) == extent(tone[:0]) == slice(0, 0)
