"""Verdict of a soak: what the fleet occupies at the end, compared with a quarter of the way.
Measures nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from fleet.lab.faults.report import filled_table, say, say_result
from fleet.lab.faults.soak_load import SoakCounts
from fleet.lab.faults.soak_samples import KEEPER, ProcessSample, SoakSample
from fleet.lab.faults.watch import Residue
from fleet.lab.report.machine import Machine
from fleet.lab.report.plot import Axes, draw_panels
from fleet.lab.report.tables import NONE

QUARTER, END = (0.25, 0.32), (0.93, 1.0)
"""Windows of the run, as shares of its requests, whose samples are compared. No process is killed
in a window or for a while before it.
"""
CALM = ((0.15, 0.32), (0.83, 1.0))
"""Parts of the run without kills, as shares of its requests: the calm time before each compared
window is equally long.
"""
MAX_GROWTH, MAX_GROWTH_COUNT = 0.03, 1
"""Largest growth that passes: as a share, or, for quantities without a unit such as threads, as a
number.
"""
MIB = 1 << 20
PANEL_INCHES = (5.5, 3.0)
PER_PROCESS: tuple[tuple[str, str, Callable[[ProcessSample], float], bool], ...] = (
    ("RSS", "MiB", lambda process: process.rss_bytes / MIB, True),
    ("PSS", "MiB", lambda process: process.pss_bytes / MIB, False),
    ("open files", "", lambda process: process.files, True),
    ("threads", "", lambda process: process.threads, True),
)
"""Quantities of a process: name, unit, value, and whether its growth is judged. PSS is not judged,
since it depends on the number of processes.
"""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a quantity from a quarter of the run to its end. Values are medians over the
    samples and over processes of the same kind. `judged`: whether growth fails the soak.
    """

    name: str
    unit: str
    quarter: float
    end: float
    judged: bool = True

    @property
    def growth(self) -> float:
        return self.end / self.quarter - 1 if self.quarter else 0.0

    @property
    def passed(self) -> bool:
        few = not self.unit and self.end - self.quarter <= MAX_GROWTH_COUNT
        return not self.judged or self.growth <= MAX_GROWTH or few


class SoakVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a soak. `complete`: whether all requests were sent in time. `kills`: (seconds
    since the first request, role of the process) of each kill.
    """

    passed: bool
    began: str
    command: tuple[str, ...]
    machine: Machine
    seed: int
    requests: int
    complete: bool
    seconds: float
    concurrency: int
    counts: SoakCounts
    kills: tuple[tuple[float, str], ...]
    changes: tuple[Change, ...]
    residue: Residue
    samples: tuple[SoakSample, ...]


def is_calm(share: float) -> bool:
    return any(low <= share <= high for low, high in CALM)


def changes_between(samples: Sequence[SoakSample], sent: int) -> tuple[Change, ...]:
    """Return how memory, keys, files and threads changed between two windows of a soak run: after a
    quarter of its requests, and at its end.

    `sent`: number of requests of the whole run. Return () if no sample was taken in a window.
    """
    quarter, end = (
        [sample for sample in samples if low <= sample.sent / max(1, sent) <= high]
        for low, high in (QUARTER, END)
    )
    if not quarter or not end:
        return ()

    def change(
        name: str, unit: str, value: Callable[[SoakSample], float], judged: bool = True
    ) -> Change:
        first, last = (median(value(sample) for sample in window) for window in (quarter, end))
        return Change(name=name, unit=unit, quarter=first, end=last, judged=judged)

    return (
        change("Redis: memory", "MiB", lambda sample: sample.redis_bytes / MIB),
        change("Redis: keys", "keys", lambda sample: sample.keys - sample.history_keys),
        change("Redis: keys of its history", "keys", lambda each: each.history_keys, False),
        *(
            change(f"{kind}: {name}", unit, _median_of(kind, value), judged)
            for kind in _kinds((*quarter, *end))
            for name, unit, value, judged in PER_PROCESS
        ),
    )


def _kinds(samples: Sequence[SoakSample]) -> list[str]:
    return sorted({process.kind for each in samples for process in each.processes} - {KEEPER})


def _median_of(kind: str, value: Callable[[ProcessSample], float]) -> Callable[[SoakSample], float]:
    def median_of_processes(sample: SoakSample) -> float:
        values = [value(process) for process in sample.processes if process.kind == kind]
        return median(values or [0.0])

    return median_of_processes


def has_passed(counts: SoakCounts, changes: Sequence[Change], residue: Residue) -> bool:
    complete = not counts.lost and not counts.different and residue.is_empty
    return complete and bool(changes) and all(change.passed for change in changes)


def show(verdict: SoakVerdict, console: Console) -> None:
    counts, minutes = verdict.counts, verdict.seconds / 60
    title = f"{verdict.requests} requests in {minutes:.1f} minutes, {len(verdict.kills)} kills"
    columns = ("", "a quarter of the way", "end", "change", f"at most {MAX_GROWTH:.0%}")
    console.print(filled_table(title, columns, map(_cells, verdict.changes)))
    say(
        console,
        f"{counts.answered} answered, {counts.aborted} aborted, {counts.lost} lost, "
        f"{counts.different} different, {counts.gateway_changes} resumed at another gateway, "
        f"{counts.refusals} refused with 429 or 503 and sent again",
    )
    failures = (
        (not verdict.changes, "there is no sample to compare: the soak was too short"),
        (
            not verdict.complete,
            f"stopped after {minutes:.0f} minutes, before all requests were sent",
        ),
        (not verdict.residue.is_empty, f"left at the end: {verdict.residue}"),
        *((True, failure) for failure in counts.first_failures),
    )
    for has_failed, line in failures:
        if has_failed:
            say(console, line, "red")
    load = f"{verdict.concurrency} requests at a time, seed {verdict.seed}"
    say_result(console, "soak", verdict.passed, load)


def _cells(change: Change) -> tuple[str, ...]:
    met = "[green]met[/]" if change.passed else "[red]missed[/]"
    values = (
        f"{value:.1f} MiB" if change.unit == "MiB" else f"{value:g}"
        for value in (change.quarter, change.end)
    )
    return (change.name, *values, f"{change.growth:+.1%}", met if change.judged else NONE)


def draw(verdict: SoakVerdict, path: Path) -> None:
    """Draw what the fleet occupied over time, with a red vertical line for each kill."""
    samples = verdict.samples
    at_s = [sample.at_s for sample in samples]

    def panel(
        title: str, lines: dict[str, Callable[[SoakSample], float]]
    ) -> Callable[[Axes], None]:
        def draw_panel(axes: Axes) -> None:
            for name, value in lines.items():
                axes.plot(at_s, list(map(value, samples)), label=name, linewidth=1)
            for kill_s, _ in verdict.kills:
                axes.axvline(kill_s, color="#dc2626", linewidth=0.4, alpha=0.5)
            axes.set(xlabel="s")
            axes.set_title(title, fontsize=9)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=6)

        return draw_panel

    panels = (
        panel("Redis: memory, MiB", {"used memory": lambda sample: sample.redis_bytes / MIB}),
        panel("Redis: keys", {"keys": lambda sample: sample.keys}),
        *(
            panel(
                f"{name} of a process{', MiB' if unit else ''}; red: a kill",
                {kind: _median_of(kind, value) for kind in _kinds(samples)},
            )
            for name, unit, value, _ in PER_PROCESS
        ),
    )
    draw_panels(panels, path, f"soak of {verdict.requests} requests, {verdict.began}", PANEL_INCHES)
