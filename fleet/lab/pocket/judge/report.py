"""Results of an evaluation: every metric with its target, and the answers that it was computed
from; shown as a table on the terminal and as a picture.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fleet.lab.pocket.corpus import Dialogue, is_right
from fleet.lab.pocket.judge.options import Part
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import Machine
from fleet.lab.report.plot import Axes, Panel, draw_panels, finish_bars
from fleet.lab.report.tables import NONE, table_of, target_cells


class Figure(msgspec.Struct, frozen=True):
    """A metric of the evaluation, computed over `count` items. A metric without a target only helps
    to interpret the others.
    """

    part: Part
    name: str
    value: float | None
    count: int
    unit: str = "%"
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target. A metric without a value misses its
        target.
        """
        if self.target is None:
            return None
        return self.value is not None and (
            self.value <= self.target if self.at_most else self.value >= self.target
        )


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A question with one right answer, and the answer received. `said`: how the question was
    asked: `typed`, or the condition of the speech.
    """

    family: str
    said: str
    question: str
    expected: str
    answer: str
    right: bool

    @staticmethod
    def of(dialogue: Dialogue, said: str, answer: str) -> "JudgedAnswer":
        """Judge `answer` as the answer to the last question of a dialogue."""
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
    """Measurements of one spoken answer, as stored in the report.

    `heard` and `teacher_heard`: transcripts of the answer and of the teacher's speech of the same
    text, keyed by the recogniser's language model; the key `grammar` exists only if the grammar can
    produce the text. Lengths exclude the silence around the speech; `lead_s` is the silence before
    it. `pitch_within`: share of voiced hops within a semitone of the teacher's pitch;
    `pitch_carried`: the same share for ideal codes.
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
    """Histogram: `counts` between `edges`, which has one element more. Values beyond the outermost
    edges are in the outermost counts.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class JudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of an evaluation; parts that were not requested are empty. `began`: local time, ISO
    8601. `took_s`: duration of each part.

    `pitch_errors`: histogram of the signed errors in semitones, counted by voiced hop of 10 ms.
    `lacking`: words of the corpus that were missing in the recogniser's dictionary and were added
    to it. `alike`: groups of words with the same pronunciation, which count as one word.
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
        """Return a copy of the report with the metrics appended, and with the fields named in
        `results` replaced.
        """
        return msgspec.structs.replace(self, figures=(*self.figures, *figures), **results)


def write_report(report: JudgeReport, path: Path) -> None:
    """Write the report as JSON, together with `met`, which says for each metric with a target
    whether the target is met.
    """
    met = {
        f"{figure.part}: {figure.name}": figure.met
        for figure in report.figures
        if figure.met is not None
    }
    write_json({"met": met, "report": report}, path)


def share(flags: Sequence[bool]) -> float | None:
    """Return the percentage of true flags, None if there are no flags."""
    return 100 * sum(flags) / len(flags) if flags else None


_TITLES = {
    "typed": "typed questions",
    "speech_out": "speech out",
    "speech_in": "speech in",
    "speed": "speed",
}


def show(report: JudgeReport, console: Console) -> None:
    machine = report.machine
    console.print(
        f"{report.model} at {report.url}, {report.sampling}; {machine.processor}, "
        f"{machine.cores} cores, "
        f"load {machine.load_1min} before",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report))
    missed = len(report.missed)
    targets = sum(figure.target is not None for figure in report.figures)
    console.print(
        f"{targets - missed} of {targets} targets met",
        style="red" if missed else "green",
        highlight=False,
    )


def _table(report: JudgeReport) -> Table:
    table = table_of("", "measured", "of", "target", "")
    parts = list(dict.fromkeys(figure.part for figure in report.figures))
    for part in parts:
        took_s = report.took_s.get(part)
        table.add_row(
            f"[bold]{_TITLES[part]}[/]" + (f" [dim]{took_s:.0f} s[/]" if took_s is not None else "")
        )
        for figure in report.figures:
            if figure.part == part:
                table.add_row(*_cells(figure))
        table.add_section()
    return table


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    if figure.target is None:
        return f"  [dim]{figure.name}[/]", _number(figure), f"{figure.count}", "", ""
    target, verdict = target_cells(
        figure.target, _unit(figure), at_most=figure.at_most, met=figure.met
    )
    return figure.name, _number(figure), f"{figure.count}", target, verdict


def _number(figure: Figure) -> str:
    if figure.value is None:
        return NONE
    digits = 0 if figure.unit in ("", "ms") else 1 if figure.unit == "%" else 2
    return f"{figure.value:.{digits}f}{_unit(figure)}"


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""


ANSWER, TEACHER, NOISY, TARGET = "#2563eb", "#b45309", "#0d9488", "#6b7280"
PANEL_INCHES = (6.5, 4.0)


def draw(report: JudgeReport, path: Path) -> None:
    """Write the picture to `path`; nothing is written if the report has nothing to draw."""
    draw_panels(
        _panels(report), path, f"{report.model}, {report.sampling}, {report.began}", PANEL_INCHES
    )


def _panels(report: JudgeReport) -> list[Panel]:
    panels: list[Panel] = []
    if report.typed or report.speech_in:
        panels.append(lambda axes: _families(axes, report))
    rates = [figure for figure in report.figures if figure.name.startswith("WER")]
    if rates:
        panels.append(lambda axes: _rates(axes, rates))
    errors = report.pitch_errors
    if errors is not None and sum(errors.counts):
        panels.append(lambda axes: _pitch(axes, errors))
    if report.speech_out:
        panels.append(lambda axes: _lengths(axes, report))
    return panels


def _families(axes: Axes, report: JudgeReport) -> None:
    """Draw the share of right answers by family: typed, and spoken in each condition, side by
    side.
    """
    colours = {"typed": ANSWER}
    for each in report.speech_in:
        colours.setdefault(each.said, TEACHER if "clean" in each.said else NOISY)
    shares_by_way = {
        way: _by_family(each for each in (*report.typed, *report.speech_in) if each.said == way)
        for way in colours
    }
    families = sorted({family for shares in shares_by_way.values() for family in shares})
    drawn = {way: shares for way, shares in shares_by_way.items() if shares}
    width = 0.8 / len(drawn)
    for place, (way, shares) in enumerate(drawn.items()):
        at = [index + (place - (len(drawn) - 1) / 2) * width for index in range(len(families))]
        axes.bar(
            at, [shares.get(family, 0) for family in families], width, color=colours[way], label=way
        )
    axes.set_xticks(range(len(families)), families, rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="right answers, %", ylim=(0, 105), title="held-out questions by family")
    axes.legend(fontsize=8, loc="lower right")
    finish_bars(axes)


def _by_family(answered: Iterable[JudgedAnswer]) -> dict[str, float]:
    flags: defaultdict[str, list[bool]] = defaultdict(list)
    for each in answered:
        flags[each.family].append(each.right)
    return {family: share(each) or 0.0 for family, each in flags.items()}


def _rates(axes: Axes, rates: list[Figure]) -> None:
    drawn = [(figure, figure.value) for figure in rates if figure.value is not None]
    for place, (figure, value) in enumerate(drawn):
        axes.barh(place, value, color=TEACHER if "teacher" in figure.name else ANSWER, height=0.6)
        axes.annotate(f" {value:.1f}", (value, place), va="center", fontsize=8)
        if figure.target is not None:
            axes.plot([figure.target] * 2, [place - 0.4, place + 0.4], color=TARGET, linestyle="--")
    axes.set_yticks(
        range(len(drawn)), [figure.name.removeprefix("WER, ") for figure, _ in drawn], fontsize=8
    )
    axes.invert_yaxis()
    axes.set(xlabel="words wrong, % (dashed: target)", title="word error rates")
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.25)


def _pitch(axes: Axes, errors: Histogram) -> None:
    total = sum(errors.counts)
    widths = [high - low for low, high in zip(errors.edges, errors.edges[1:], strict=False)]
    axes.bar(
        errors.edges[:-1],
        [100 * count / total for count in errors.counts],
        widths,
        align="edge",
        color=ANSWER,
    )
    for semitone in (-1, 1):
        axes.axvline(semitone, color=TARGET, linestyle="--")
    axes.set(
        xlabel="semitones above the teacher's pitch",
        ylabel="voiced hops, %",
        title=f"pitch, {total} voiced hops of 10 ms",
    )
    finish_bars(axes)


def _lengths(axes: Axes, report: JudgeReport) -> None:
    spoken = [each for each in report.speech_out if each.length_s > 0]
    axes.scatter(
        [each.teacher_length_s for each in spoken],
        [each.length_s for each in spoken],
        s=8,
        color=ANSWER,
        alpha=0.6,
    )
    longest_s = max((each.teacher_length_s for each in spoken), default=1.0)
    for factor, style in ((0.85, "--"), (1.0, "-"), (1.15, "--")):
        axes.plot(
            [0, longest_s], [0, factor * longest_s], color=TARGET, linestyle=style, linewidth=1
        )
    axes.set(
        xlabel="s, the teacher", ylabel="s, the answer", title="length of the speech (dashed: 15 %)"
    )
    finish_bars(axes)
