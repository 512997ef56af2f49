"""Results of an evaluation: every figure with its target, and every answer that it was computed
from.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleet.lab.pocket.corpus import Dialogue, is_right
from fleet.lab.pocket.judge.options import Part
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import Machine


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number, computed over `count` items. Without a target it only helps to interpret the
    others.
    """

    part: Part
    name: str
    value: float | None
    unit: str = "%"
    count: int
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """True if the target is met, None if there is none. Without a value, a target is missed."""
        if self.target is None:
            return None
        return self.value is not None and (
            self.value <= self.target if self.at_most else self.value >= self.target
        )


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A question that has one right answer. `said`: how it was asked, `typed` or the condition of
    the speech.
    """

    family: str
    said: str
    question: str
    expected: str
    answer: str
    right: bool

    @staticmethod
    def of(dialogue: Dialogue, said: str, answer: str) -> "JudgedAnswer":
        """Judge the answer to the last question of a dialogue."""
        return JudgedAnswer(
            family=dialogue.family,
            said=said,
            question=" / ".join(turn.text for turn in dialogue.turns[:-1]),
            expected=dialogue.turns[-1].text,
            answer=answer,
            right=is_right(dialogue, answer),
        )


class Transcribed(msgspec.Struct, frozen=True, kw_only=True):
    said: str
    text: str
    transcript: str


class JudgedSpeech(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a spoken answer.

    `heard` and `teacher_heard`: transcripts of it and of the teacher's speech of the same text, by
    language model; the grammar is used only if it can produce the text. Lengths exclude the silence
    around the speech, of which `lead_s` is before it.
    `pitch_within`: share of voiced hops within a semitone of the teacher's pitch; `pitch_carried`:
    the same of ideal codes.
    """

    family: str
    voice: str
    text: str
    ends: bool
    lead_s: float
    length_s: float
    teacher_length_s: float
    heard: dict[str, str]
    teacher_heard: dict[str, str]
    pitch_within: float | None
    pitch_carried: float | None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts between edges, one more edge than counts; values beyond the outermost edges are in the
    outermost counts.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class JudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation; parts that were not requested are empty. `began` is local time, ISO 8601;
    `took_s` by part.

    `pitch_errors`: signed, in semitones, by voiced hop of 10 ms. `lacking`: words of the corpus
    that the recogniser's dictionary lacks, added to it; `alike`: groups of words with the same
    pronunciation, which count as one word.
    """

    began: str
    url: str
    model: str
    machine: Machine
    sampling: str
    seed: int
    figures: tuple[Figure, ...] = ()
    took_s: dict[str, float] = {}
    typed: tuple[JudgedAnswer, ...] = ()
    speech_out: tuple[JudgedSpeech, ...] = ()
    speech_in: tuple[JudgedAnswer, ...] = ()
    transcribed: tuple[Transcribed, ...] = ()
    pitch_errors: Histogram | None = None
    lacking: tuple[str, ...] = ()
    alike: tuple[tuple[str, ...], ...] = ()

    @property
    def missed(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.met is False)

    def adding(self, figures: Iterable[Figure], **results: Any) -> "JudgeReport":
        """Return the report with more figures, and with the fields of one part in `results`."""
        return msgspec.structs.replace(self, figures=(*self.figures, *figures), **results)


def write_report(report: JudgeReport, path: Path) -> None:
    """Write the report, and `met`: True for each target that is met."""
    met = {
        f"{figure.part}: {figure.name}": figure.met
        for figure in report.figures
        if figure.met is not None
    }
    write_json({"met": met, "report": report}, path)


def share(flags: Sequence[bool]) -> float | None:
    """Return the share of true flags in percent, None if there are none."""
    return 100 * sum(flags) / len(flags) if flags else None
