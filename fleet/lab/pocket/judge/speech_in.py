"""Evaluation of spoken questions: the share of right answers, and the WER of transcripts.

The questions are the teacher's speech: clean in training voices, and with noise in voices that
training does not use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import jiwer
import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.lab.pocket.corpus import Dialogue, spoken
from fleet.lab.pocket.hearing.augment import add_noise, coloured
from fleet.lab.pocket.hearing.recordings import SAMPLE_RATE_HZ
from fleet.lab.pocket.hearing.voices import known_voice, unseen_voice
from fleet.lab.pocket.judge import ask
from fleet.lab.pocket.judge.ask import JudgeClient
from fleet.lab.pocket.judge.options import COMMAND, JudgeOptions
from fleet.lab.pocket.judge.questions import distinct, speak_all
from fleet.lab.pocket.judge.report import Figure, JudgedAnswer, JudgeReport, Transcribed, share
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ as TEACHER_RATE_HZ
from fleet.lab.pocket.teacher import SynthesizedSpeech, Voice
from fleet.lab.report.progress import progress_bar

NOISE: Final = "pink"
_figure = partial(Figure, "speech_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Condition in which questions are spoken. `draw`: chooses a voice. `noise_db`: signal-to-noise
    ratio, None for no noise. `target`: least share of right answers in percent. `wer_target`:
    largest WER of transcripts in percent, None for no target.
    """

    name: str
    draw: Callable[[Random], Voice]
    noise_db: float | None
    target: float
    wer_target: float | None


CONDITIONS: Final = (
    Condition(name="clean", draw=known_voice, noise_db=None, target=90, wer_target=10),
    Condition(
        name="unseen voices, 15 dB noise",
        draw=unseen_voice,
        noise_db=15,
        target=85,
        wer_target=None,
    ),
)


def judge(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    dialogues = distinct(options.speech_in, options.seed)
    for condition in CONDITIONS:
        report = _in_condition(report, client, options, condition, dialogues)
    return report


def _in_condition(
    report: JudgeReport,
    client: JudgeClient,
    options: JudgeOptions,
    condition: Condition,
    dialogues: Sequence[Dialogue],
) -> JudgeReport:
    clips = _clips(dialogues, condition, options.seed)
    questions = [
        ask.spoken(dialogue, user_clips)
        for dialogue, user_clips in zip(dialogues, clips, strict=True)
    ]
    questions += [ask.transcribe(user_clips[-1]) for user_clips in clips]
    with progress_bar(COMMAND, f"spoken questions, {condition.name}", len(questions)) as advance:
        texts = [reply.text for reply in client.ask_all(questions, options.concurrency, advance)]
    answers, transcripts = texts[: len(dialogues)], texts[len(dialogues) :]
    answered = [
        JudgedAnswer.of(dialogue, condition.name, text)
        for dialogue, text in zip(dialogues, answers, strict=True)
    ]
    transcribed = [
        Transcribed(
            said=condition.name, text=dialogue.turns[-2].text, transcript=spoken(transcript)
        )
        for dialogue, transcript in zip(dialogues, transcripts, strict=True)
    ]
    return report.adding(
        _figures(condition, answered, transcribed),
        speech_in=(*report.speech_in, *answered),
        transcribed=(*report.transcribed, *transcribed),
    )


def _figures(
    condition: Condition, answered: Sequence[JudgedAnswer], transcribed: Sequence[Transcribed]
) -> tuple[Figure, ...]:
    right = share([each.right for each in answered])
    wer = jiwer.wer([each.text for each in transcribed], [each.transcript for each in transcribed])
    name, target = condition.name, condition.target
    return (
        _figure(f"right answers, {name}", right, len(answered), target=target),
        _figure(
            f"WER of transcripts, {name}",
            100 * float(wer),
            len(transcribed),
            target=condition.wer_target,
            at_most=True,
        ),
    )


def _clips(dialogues: Sequence[Dialogue], condition: Condition, seed: int) -> list[list[bytes]]:
    """Return the user's turns of each dialogue as WAV files, with the noise of the condition and a
    single voice per dialogue.
    """
    rng = Random(f"judge {condition.name} {seed}")
    voices = [condition.draw(rng) for _ in dialogues]
    lines = [
        (turn.text, voice)
        for dialogue, voice in zip(dialogues, voices, strict=True)
        for turn in dialogue.turns
        if turn.role == "user"
    ]
    noise = np.random.default_rng(seed)
    files = iter([_file(speech, condition, noise) for speech in speak_all(lines)])
    return [
        [next(files) for turn in dialogue.turns if turn.role == "user"] for dialogue in dialogues
    ]


def _file(speech: SynthesizedSpeech, condition: Condition, rng: np.random.Generator) -> bytes:
    samples: NDArray[np.float32] = soxr.resample(speech.samples, TEACHER_RATE_HZ, SAMPLE_RATE_HZ)
    if condition.noise_db is not None:
        samples = add_noise(samples, coloured(NOISE, len(samples), rng), condition.noise_db)
    return ask.wav_file(np.clip(samples, -1, 1), SAMPLE_RATE_HZ)
