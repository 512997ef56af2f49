"""The verdict as one picture: each answer as a line in time, the faults across it, and the gaps
beside. Measures nothing.
"""

from pathlib import Path

from fleet.lab.faults.answer import longest_gap_s
from fleet.lab.faults.pauses import is_open_during
from fleet.lab.faults.report import Verdict
from fleet.lab.faults.schedule import FaultKind
from fleet.lab.report.plot import Axes, saved_figure

COLOURS = {FaultKind.KILL: "#dc2626", FaultKind.STOP: "#2563eb", FaultKind.TERM: "#b45309"}
REDIS_COLOUR = "#7c3aed"
ANSWER, OPEN, UNDISTURBED, BAD = "#9ca3af", "#0d9488", "#6b7280", "#dc2626"
SIZE_INCHES = (11.0, 6.5)


def draw(verdict: Verdict, path: Path) -> None:
    with saved_figure(path, 1, 2, SIZE_INCHES, width_ratios=(3, 1)) as (figure, (times, gaps)):
        _draw_timeline(times, verdict)
        _draw_gaps(gaps, verdict)
        result = "passed" if verdict.passed else "failed"
        failures = (
            f"{len(verdict.lost)} lost, {len(verdict.changed)} changed, "
            f"{len(verdict.different)} different"
        )
        counts = f"{len(verdict.disturbed)} requests, {failures}, {len(verdict.faults)} faults"
        figure.suptitle(
            f"chaos {result}: {verdict.model}, seed {verdict.seed}, {counts}", fontsize=10
        )


def _draw_timeline(axes: Axes, verdict: Verdict) -> None:
    for place, outcome in enumerate(sorted(verdict.disturbed, key=lambda one: one.sent_s)):
        is_open = any(is_open_during(outcome, fault) for fault in verdict.faults)
        colour = BAD if outcome.lost or outcome.difference else OPEN if is_open else ANSWER
        axes.plot((outcome.sent_s, outcome.ended_s), (place, place), color=colour, linewidth=0.8)
        chunks_s = [outcome.sent_s + at_s for at_s in outcome.chunks_s]
        axes.plot(chunks_s, [place] * len(chunks_s), ".", color=colour, markersize=3)
    for fault in verdict.faults:
        colour = COLOURS.get(fault.kind, REDIS_COLOUR)
        axes.axvline(fault.at_s, color=colour, linewidth=1)
        end_s = fault.at_s + fault.recovered_s if fault.recovered_s else axes.get_xlim()[1]
        axes.axvspan(fault.at_s, end_s, color=colour, alpha=0.08)
        place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
        axes.annotate(
            f"{fault.signal} {fault.role}", (fault.at_s, 1.0), **place, fontsize=7, color=colour
        )
    axes.set(
        xlabel="s",
        ylabel="answers",
        title="every answer, chunk by chunk; shaded: until the fleet has recovered",
    )
    axes.title.set_fontsize(9)


def _draw_gaps(axes: Axes, verdict: Verdict) -> None:
    open_during = [
        one
        for one in verdict.disturbed
        if any(is_open_during(one, fault) for fault in verdict.faults)
    ]
    groups = (
        ("undisturbed", UNDISTURBED, verdict.undisturbed),
        ("open during\na fault", OPEN, open_during),
    )
    for place, (label, colour, outcomes) in enumerate(groups):
        known = [gap_s for one in outcomes if (gap_s := longest_gap_s(one.chunks_s)) is not None]
        places = [
            place + 0.3 * (index / max(1, len(known) - 1) - 0.5) for index in range(len(known))
        ]
        axes.plot(places, sorted(known), ".", color=colour, label=label)
    axes.set_xticks((0, 1), [label for label, _, _ in groups], fontsize=8)
    axes.set(ylabel="s", title="longest gap of each answer", xlim=(-0.5, 1.5))
    axes.set_ylim(bottom=0)
    axes.title.set_fontsize(9)
    axes.grid(axis="y", alpha=0.25)
