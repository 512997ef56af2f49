"""The report as one picture: right answers by family, word error rates beside the teacher's, pitch,
length.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fleet.lab.pocket.judge.report import Figure, Histogram, JudgedAnswer, JudgeReport, share
from fleet.lab.report.plot import Axes, Panel, draw_panels, finish_bars

ANSWER, TEACHER, NOISY, TARGET = "#2563eb", "#b45309", "#0d9488", "#6b7280"
PANEL_INCHES = (6.5, 4.0)


def draw(report: JudgeReport, path: Path) -> None:
    """Write the picture, or none if the report has nothing to draw."""
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
    """Draw right answers by family: typed, and spoken in each condition, side by side."""
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
