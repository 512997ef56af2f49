"""Benchmark of a spoken assistant: what it hears of ten questions and twenty sentences, spoken in a
voice that the fleet does not have, what it answers and says, and how soon it speaks.

`fleet bench --voice --wav FOLDER` keeps every recording in the folder. What the fleet says is heard
again by its own recogniser. Takes no stage names.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Group
from rich.markup import escape

from fleet.lab.client.client import ApiClient, SpeechCall
from fleet.lab.measure.assistant_turn import AssistantTurn, TurnFiles, ask_assistant
from fleet.lab.measure.deployment import target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import with_background_load
from fleet.lab.measure.measurement import BenchOptions, Context, Measurement, argument
from fleet.lab.measure.speakers import (
    ESPEAK,
    SPEAKER,
    BenchSpeaker,
    CorpusClip,
    SpokenPrompt,
    open_speaker,
    read_corpus,
    write_wav,
)
from fleet.lab.measure.voice import recordings_folder, until_last_voiced
from fleet.lab.measure.word_errors import word_errors, words_of
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, Summary, at_least, at_most, summarise
from fleet.lab.report.tables import summary_table, table_of, titled

QUESTIONS = (
    ("What is the capital of France?", ("paris",)),
    ("What is the opposite of hot?", ("cold", "cool")),
    ("How many days are there in a week?", ("seven",)),
    ("What is the color of the sky?", ("blue",)),
    ("Which planet do we live on?", ("earth",)),
    ("What is the largest ocean?", ("pacific",)),
    ("What do bees make?", ("honey",)),
    ("What is frozen water called?", ("ice",)),
    ("How many legs does a spider have?", ("eight",)),
    ("What is two plus three?", ("five",)),
)
"""Questions, and the words of which a right answer has at least one."""
SENTENCES = (
    "Please turn off the lights in the kitchen.",
    "The train to Boston leaves at seven thirty.",
    "I would like a cup of coffee and a piece of cake.",
    "She has lived in this town for twenty years.",
    "The weather will be cold and windy tomorrow.",
    "We need three more chairs for the meeting.",
    "My brother plays the violin in an orchestra.",
    "Don't forget to lock the door when you leave.",
    "The library is closed on public holidays.",
    "It costs about fifteen dollars to fix it.",
    "He read the letter twice before he answered.",
    "The children are playing in the garden behind the house.",
    "Can you remind me to call the doctor on Friday?",
    "There is a good restaurant across the street.",
    "The old bridge was built more than a century ago.",
    "I have never seen so many stars in the sky.",
    "Take the second road on the left after the church.",
    "Our neighbors bought a new car last week.",
    "Water boils at one hundred degrees.",
    "Thank you very much, and good night.",
)
TARGET_IN_PERCENT, TARGET_CORPUS_PERCENT, TARGET_OUT_PERCENT = 2.0, 3.0, 3.0
TARGET_RIGHT = 8
TARGET_VOICE_MS, TARGET_DECIDED_MS, TARGET_PAIR_MS = 900.0, 600.0, 1500.0
TARGET_TRANSCRIPT_MS = 150.0
SHOWN_CHARS = 60

Item = TypeVar("Item")


class AssistantResult(Result, frozen=True, kw_only=True):
    """What an assistant heard, answered and said. `turns`: questions asked alone. `pairs`:
    questions asked by two speakers at one time.

    The other texts are pairs (said, heard): `sentences` in the speaker's voice, `clips` of a
    corpus, `answers` of the fleet, and `spoken`, the sentences in the fleet's voice.
    """

    model: str
    speaker: str
    turns: tuple[AssistantTurn, ...]
    pairs: tuple[AssistantTurn, ...]
    sentences: tuple[tuple[str, str], ...]
    clips: tuple[tuple[str, str], ...]
    answers: tuple[tuple[str, str], ...]
    spoken: tuple[tuple[str, str], ...]
    others_cores: float | None = None

    @property
    def heard(self) -> tuple[tuple[str, str], ...]:
        """Return pairs (said, heard) of the questions and sentences in the speaker's voice."""
        return tuple((turn.question, turn.heard) for turn in self.turns) + self.sentences

    @property
    def num_right(self) -> int:
        return sum(map(is_right, self.turns))

    @property
    def underruns(self) -> int:
        return sum(turn.underruns for turn in (*self.turns, *self.pairs))

    def part_ms(self, name: str) -> Summary | None:
        """Summarise one part of the latency that the fleet itself reported, for the questions asked
        alone. `name`: name of the `LatencyPart`. Return None if no report has this part.
        """
        parts = (part for turn in self.turns for part in turn.parts)
        return summarise([part.ms for part in parts if part.name == name])

    @property
    def transcript_ms(self) -> Summary | None:
        """Time from the end of the user's turn to its final transcript, for the questions asked
        alone.
        """
        return summarise([turn.transcript_ms for turn in self.turns])

    def tables(self) -> Iterator[Group]:
        yield self._answer_table()
        yield self._word_table()
        names = dict.fromkeys(part.name for turn in self.turns for part in turn.parts)
        rows = [
            ("first voiced sample after the end of speech", _voice_ms(self.turns)),
            ("  after the end of the turn was decided", _decided_ms(self.turns)),
            *((f"  fleet's report: {name}", self.part_ms(name)) for name in names),
            ("final transcript after the end of the turn, events' arrival", self.transcript_ms),
            ("two speakers at a time, after the end of speech", _voice_ms(self.pairs)),
        ]
        yield summary_table("latency, read from the recordings of the sound card", "ms", rows)

    def targets(self) -> list[Ratio]:
        alone, pairs, decided = map(
            summarise,
            (
                [turn.voice_to_voice_ms for turn in self.turns],
                [turn.voice_to_voice_ms for turn in self.pairs],
                [turn.after_decision_ms for turn in self.turns],
            ),
        )
        said = word_errors((*self.answers, *self.spoken)).percent
        ratios = [
            at_most("word errors in", word_errors(self.heard).percent, TARGET_IN_PERCENT, "%"),
            at_most("word errors out", said, TARGET_OUT_PERCENT, "%"),
            at_least("right answers", self.num_right, TARGET_RIGHT, "answers"),
            at_most("underruns", self.underruns, 0, "underruns"),
        ]
        if self.clips:
            errors = word_errors(self.clips).percent
            ratios.insert(1, at_most("word errors, people", errors, TARGET_CORPUS_PERCENT, "%"))
        for name, found, target in (
            ("voice to voice, p50", alone, TARGET_VOICE_MS),
            ("voice after the decision, p50", decided, TARGET_DECIDED_MS),
            ("voice to voice, two speakers, p50", pairs, TARGET_PAIR_MS),
            ("final transcript, p50", self.transcript_ms, TARGET_TRANSCRIPT_MS),
        ):
            ratios += [at_most(name, found.p50, target, "ms")] if found else []
        return ratios

    def _answer_table(self) -> Group:
        table = table_of("heard, and answered", "", "voice ms")
        for turn in self.turns:
            verdict = "right" if is_right(turn) else "[red]wrong[/]"
            texts = [turn.heard, f"  {' '.join(turn.answer.split())}"]
            shown = "\n".join(escape(text[:SHOWN_CHARS]) for text in texts)
            table.add_row(shown, verdict, f"{turn.voice_to_voice_ms:.0f}")
        title = f"{self.num_right} of {len(self.turns)} questions to {self.model} answered right"
        return titled(title, table)

    def _word_table(self) -> Group:
        table = table_of("word errors", "words", "errors", "%")
        for name, pairs in (
            (f"in: questions and sentences by {self.speaker}", self.heard),
            ("in: clips of the corpus", self.clips),
            ("out: answers", self.answers),
            ("out: sentences in the fleet's voice", self.spoken),
        ):
            found = word_errors(pairs)
            if pairs:
                counts = (str(found.words), str(found.errors), f"{found.percent:.1f}")
                table.add_row(name, *counts)
        return titled("heard by the fleet's own recogniser", table)


def _numbered(items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
    return enumerate(items, 1)


def is_right(turn: AssistantTurn) -> bool:
    """Return True if the answer has one of the words expected for its question."""
    expected = dict(QUESTIONS).get(turn.question, ())
    return not set(expected).isdisjoint(words_of(turn.answer))


def _voice_ms(turns: Iterable[AssistantTurn]) -> Summary | None:
    return summarise([turn.voice_to_voice_ms for turn in turns])


def _decided_ms(turns: Iterable[AssistantTurn]) -> Summary | None:
    return summarise([turn.after_decision_ms for turn in turns])


def speak_all(
    speaker: BenchSpeaker, folder: Path, step: Callable[[], None]
) -> tuple[list[SpokenPrompt], list[SpokenPrompt]]:
    """Let the speaker speak the questions and the sentences, and keep them in the folder. Raises:
    BenchError.
    """

    def speak(kind: str, text: str, number: int) -> SpokenPrompt:
        path = folder / f"{kind}-{number:02d}.wav"
        samples = until_last_voiced(speaker.speak(text, path.name))
        if not len(samples):
            raise BenchError(f"--speaker: {speaker.name} speaks {text!r} as silence")
        write_wav(path, samples)
        step()
        return SpokenPrompt(text=text, samples=samples, path=path)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPEAKER).write_text(f"{speaker.name}\n")
    questions = [speak("question", text, n) for n, (text, _) in _numbered(QUESTIONS)]
    return questions, [speak("sentence", text, n) for n, text in _numbered(SENTENCES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run of the benchmark. `folder`: place of the recordings. `step`: function that advances the
    progress bar.
    """

    api: ApiClient
    model: str
    folder: Path
    step: Callable[[], None]

    def measure(
        self,
        speaker: str,
        questions: Sequence[SpokenPrompt],
        sentences: Sequence[SpokenPrompt],
        clips: Sequence[CorpusClip],
    ) -> AssistantResult:
        """Measure everything, after one question that warms the fleet up. Raises: ApiError,
        BenchError.
        """
        self._ask(questions[0], "warm-up")
        turns = [self._ask(question, f"{n:02d}") for n, question in _numbered(questions)]
        half = len(questions) // 2
        couples = zip(questions[:half], questions[half:], strict=True)
        pairs = [turn for n, couple in _numbered(couples) for turn in self._ask_both(n, couple)]
        return AssistantResult(
            model=self.model,
            speaker=speaker,
            turns=tuple(turns),
            pairs=tuple(pairs),
            sentences=tuple((each.text, self._hear(each.path)) for each in sentences),
            clips=tuple((clip.text, self._hear(clip.path)) for clip in clips),
            answers=tuple(
                (turn.answer, self._hear(self.folder / f"answer-{n:02d}.wav"))
                for n, turn in _numbered(turns)
            ),
            spoken=tuple(self._hear_spoken(text, n) for n, text in _numbered(SENTENCES)),
        )

    def _ask(
        self,
        question: SpokenPrompt,
        name: str,
        begin: Callable[[], object] = lambda: None,
    ) -> AssistantTurn:
        files = TurnFiles(
            answer=self.folder / f"answer-{name}.wav",
            recording=self.folder / f"recording-{name}.wav",
        )
        turn = ask_assistant(self.api, self.model, question, files, begin)
        self.step()
        return turn

    def _ask_both(
        self, number: int, couple: tuple[SpokenPrompt, SpokenPrompt]
    ) -> list[AssistantTurn]:
        """Ask two questions at one time, each by a speaker of its own."""
        together = threading.Barrier(len(couple))
        with ThreadPoolExecutor(len(couple)) as pool:
            asked = [
                pool.submit(self._ask, question, f"pair-{number:02d}-{speaker}", together.wait)
                for speaker, question in _numbered(couple)
            ]
            return [each.result() for each in asked]

    def _hear_spoken(self, text: str, number: int) -> tuple[str, str]:
        path = self.folder / f"spoken-{number:02d}.wav"
        path.write_bytes(self.api.speech(SpeechCall(model=self.model, input=text)))
        return text, self._hear(path)

    def _hear(self, path: Path) -> str:
        heard = self.api.transcribe(self.model, path.read_bytes(), path.name)
        self.step()
        return heard


def _measure(context: Context) -> AssistantResult:
    options = context.options
    folder = recordings_folder(options)
    assert folder is not None, "a measurement of an assistant is requested with a folder"
    speaker = open_speaker(options.speaker)
    clips = read_corpus(options.corpus) if options.corpus else ()
    spoken = len(QUESTIONS) + len(SENTENCES)
    step = context.steps(f"questions and sentences, spoken by {speaker.name}", spoken)
    questions, sentences = speak_all(speaker, folder, step)
    with target_fleet(context) as target:
        total = 1 + 3 * len(QUESTIONS) + 2 * len(SENTENCES) + len(clips)
        step = context.steps("spoken turns and transcripts", total)
        run = _Run(api=target.api, model=target.api.model(), folder=folder, step=step)
        return with_background_load(
            options.up, lambda: run.measure(speaker.name, questions, sentences, clips)
        )


def _conflict(options: BenchOptions) -> str:
    folder = recordings_folder(options)
    if folder is None:
        if options.corpus is not None:
            return "--corpus is for --voice --wav FOLDER"
        lonely = options.speaker != ESPEAK and not options.recording
        return "--speaker is for --voice --wav FOLDER and for --recording" if lonely else ""
    if len(options.wavs) > 1 or options.barge_in or (options.sessions or 1) > 1:
        return f"--wav {folder} is a folder, which measures an assistant: give it alone"
    return ""


MEASUREMENT = Measurement(
    place=135,
    key="assistant",
    run=_measure,
    is_requested=lambda options: recordings_folder(options) is not None,
    conflict=_conflict,
    of_gateway=True,
    about={
        "--wav": "with a folder: a spoken assistant. Ten questions and twenty sentences in the "
        "voice of --speaker, which the fleet does not have. Word errors of what it hears and of "
        "what it says, as its own recogniser hears that; right answers; the time from the last "
        "voiced sample spoken to the first one played, read from stereo recordings of a simulated "
        "sound card; underruns; two speakers at a time. The folder keeps every recording"
    },
    arguments=(
        argument(
            "--speaker",
            default=ESPEAK,
            metavar="VOICE",
            help=f"for --wav FOLDER and --recording: {ESPEAK}[:NAME], the folder of a voice, "
            f"FOLDER[:NAME], or a folder of recordings, such as that of an earlier run ({ESPEAK})",
        ),
        argument(
            "--corpus",
            type=Path,
            metavar="FOLDER",
            help="for --wav FOLDER: recordings of people in CMU Sphinx's format, which the fleet "
            "also writes down",
        ),
    ),
)
