"""What was found: every figure beside its target, and every answer it was made of. Measures nothing."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleet.pocket.judge.options import Part
from fleet.reporting.files import write_json
from fleet.reporting.machine import Machine


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number, over `count` of something. Without a target it is there to understand the others by."""

    part: Part
    name: str
    value: float | None
    unit: str = "%"
    count: int
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """None where there is no target; nothing measured is a target missed."""
        if self.target is None:
            return None
        return self.value is not None and (self.value <= self.target if self.at_most else self.value >= self.target)


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A question that has one right answer. `said` is how it was asked: typed, or by whom and in what."""

    family: str
    said: str
    question: str
    expected: str
    answer: str
    right: bool


class Transcribed(msgspec.Struct, frozen=True, kw_only=True):
    said: str
    text: str
    transcript: str


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A spoken answer as it was listened to.

    `heard` and `teacher_heard`: what the recogniser made of it and of the teacher's speech of the same text, by language model;
    the grammar is asked only where it can say the text. Lengths without the silence around; `lead_s` is what of it comes before.
    `pitch_within`: the share of voiced hops within a semitone of the teacher's; `pitch_carried`: the same of the pitch that
    ideal codes would carry.
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
    """Invariants: one more edge than counts; what lies beyond the edges is counted in the outermost."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class JudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation; parts that were not asked for are empty. `began` is local time, ISO 8601; `took_s` by part.

    `pitch_errors`: signed, in semitones, by voiced hop of 10 ms. `lacking`: words of the corpus that the recogniser's dictionary
    lacks and was told; `alike`: those that it cannot tell apart, which count as one.
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
    speech_out: tuple[Heard, ...] = ()
    speech_in: tuple[JudgedAnswer, ...] = ()
    transcribed: tuple[Transcribed, ...] = ()
    pitch_errors: Histogram | None = None
    lacking: tuple[str, ...] = ()
    alike: tuple[tuple[str, ...], ...] = ()

    @property
    def missed(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.met is False)


class JudgeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file of a report, and whether each target is met."""

    met: dict[str, bool]
    report: JudgeReport


def write_report(report: JudgeReport, path: Path) -> None:
    met = {f"{figure.part}: {figure.name}": figure.met for figure in report.figures if figure.met is not None}
    write_json(JudgeFile(met=met, report=report), path)


def read_report(path: Path) -> JudgeReport:
    return msgspec.json.decode(path.read_bytes(), type=JudgeFile).report


def share(flags: Sequence[bool]) -> float | None:
    """In percent; None of nothing."""
    return 100 * sum(flags) / len(flags) if flags else None
