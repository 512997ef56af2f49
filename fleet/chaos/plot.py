"""The verdict as one picture: each answer as a line in time, the blows across it, and the pauses beside. Measures nothing."""

from pathlib import Path
from typing import Any

from fleet.chaos.answer import longest_gap_s
from fleet.chaos.pauses import is_caught
from fleet.chaos.report import Verdict
from fleet.chaos.schedule import How

COLOURS = {How.KILL: "#dc2626", How.STOP: "#2563eb", How.TERM: "#b45309"}
ANSWER, CAUGHT, UNDISTURBED, BAD = "#9ca3af", "#0d9488", "#6b7280", "#dc2626"
SIZE_INCHES, DPI = (11.0, 6.5), 130

Axes = Any
"""`matplotlib.axes.Axes`, whose annotations are incomplete."""


def draw(verdict: Verdict, path: Path) -> None:
    import matplotlib

    # No window: this runs where there is no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, gaps) = pyplot.subplots(1, 2, figsize=SIZE_INCHES, width_ratios=(3, 1), layout="constrained")
    _timeline(times, verdict)
    _gaps(gaps, verdict)
    said = "passed" if verdict.passed else "failed"
    faults = f"{len(verdict.lost)} lost, {len(verdict.changed)} changed, {len(verdict.different)} differing"
    counts = f"{len(verdict.disturbed)} requests, {faults}"
    figure.suptitle(f"chaos {said}: {verdict.model}, seed {verdict.seed}, {counts}, {len(verdict.hits)} blows", fontsize=10)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _timeline(axes: Axes, verdict: Verdict) -> None:
    for place, outcome in enumerate(sorted(verdict.disturbed, key=lambda one: one.sent_s)):
        caught = any(is_caught(outcome, hit) for hit in verdict.hits)
        colour = BAD if outcome.lost or outcome.difference else CAUGHT if caught else ANSWER
        axes.plot((outcome.sent_s, outcome.ended_s), (place, place), color=colour, linewidth=0.8)
        axes.plot([outcome.sent_s + at_s for at_s in outcome.chunks_s], [place] * len(outcome.chunks_s), ".",
                  color=colour, markersize=3)  # fmt: skip
    for hit in verdict.hits:
        colour = COLOURS[hit.how]
        axes.axvline(hit.at_s, color=colour, linewidth=1)
        axes.axvspan(hit.at_s, hit.at_s + hit.whole_s if hit.whole_s else axes.get_xlim()[1], color=colour, alpha=0.08)
        axes.annotate(f"{hit.signal} {hit.role}", (hit.at_s, 1.0), xycoords=("data", "axes fraction"), rotation=90,
                      va="top", ha="right", fontsize=7, color=colour)  # fmt: skip
    axes.set(xlabel="s", ylabel="answers", title="every answer, chunk by chunk; shaded: until the fleet was whole again")
    axes.title.set_fontsize(9)


def _gaps(axes: Axes, verdict: Verdict) -> None:
    caught = [one for one in verdict.disturbed if any(is_caught(one, hit) for hit in verdict.hits)]
    for place, (label, colour, outcomes) in enumerate(
        (("undisturbed", UNDISTURBED, verdict.undisturbed), ("under way\nduring a blow", CAUGHT, caught))
    ):
        known = [gap_s for one in outcomes if (gap_s := longest_gap_s(one.chunks_s)) is not None]
        axes.plot([place + 0.3 * (index / max(1, len(known) - 1) - 0.5) for index in range(len(known))],
                  sorted(known), ".", color=colour, label=label)  # fmt: skip
    axes.set_xticks((0, 1), ["undisturbed", "under way\nduring a blow"], fontsize=8)
    axes.set(ylabel="s", title="longest gap of each answer", xlim=(-0.5, 1.5))
    axes.set_ylim(bottom=0)
    axes.title.set_fontsize(9)
    axes.grid(axis="y", alpha=0.25)
