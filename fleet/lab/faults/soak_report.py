"""The verdict of a soak: what the fleet occupies at its end, beside a quarter of the way. Measures
nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from fleet.lab.faults.soak_load import SoakCounts
from fleet.lab.faults.soak_samples import ProcessSample, SoakSample
from fleet.lab.faults.watch import Residue
from fleet.lab.report.machine import Machine
from fleet.lab.report.plot import Axes, draw_panels
from fleet.lab.report.tables import NONE, table_of, titled

QUARTER, END = (0.25, 0.32), (0.93, 1.0)
"""Shares of the requests between which samples are compared. No process is killed in them, and none
for a while before.
"""
CALM = ((0.15, 0.32), (0.83, 1.0))
"""Shares of the requests without kills: as long before the first comparison as before the
second.
"""
MAX_GROWTH, MAX_GROWTH_COUNT = 0.03, 1
"""Growth that passes; of counts one more passes too."""
KEEPER = "keeper"
MIB = 1 << 20
PANEL_INCHES = (5.5, 3.0)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity at a quarter of the way and at the end: the median of its samples, and of the
    processes of one kind.

    `judged`: False for one that is shown only, since it depends on how many processes run.
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
    """One soak. `complete`: all requests were sent in time. `kills`: the moments at which a process
    was killed, in seconds since the first request, and its role.
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
    """Compare the two windows of a run that sent so many requests; () if one of them has no
    sample.
    """
    quarter, end = (
        [sample for sample in samples if low <= sample.sent / max(1, sent) <= high]
        for low, high in (QUARTER, END)
    )
    if not quarter or not end:
        return ()
    kinds = sorted(
        {process.kind for sample in (*quarter, *end) for process in sample.processes} - {KEEPER}
    )

    def change(
        name: str, unit: str, value: Callable[[SoakSample], float], *, judged: bool = True
    ) -> Change:
        first, last = (median(value(sample) for sample in window) for window in (quarter, end))
        return Change(name=name, unit=unit, quarter=first, end=last, judged=judged)

    changes = [
        change("Redis: memory", "MiB", lambda sample: sample.redis_bytes / MIB),
        change("Redis: keys", "keys", lambda sample: sample.keys - sample.series_keys),
        change(
            "Redis: keys of the time series",
            "keys",
            lambda sample: sample.series_keys,
            judged=False,
        ),
    ]
    for kind in kinds:
        changes += [
            change(f"{kind}: RSS", "MiB", _of(kind, lambda process: process.rss_bytes / MIB)),
            change(
                f"{kind}: PSS",
                "MiB",
                _of(kind, lambda process: process.pss_bytes / MIB),
                judged=False,
            ),
            change(f"{kind}: open files", "", _of(kind, lambda process: process.files)),
            change(f"{kind}: threads", "", _of(kind, lambda process: process.threads)),
        ]
    return tuple(changes)


def _of(kind: str, value: Callable[[ProcessSample], float]) -> Callable[[SoakSample], float]:
    def median_of_processes(sample: SoakSample) -> float:
        return median(
            [value(process) for process in sample.processes if process.kind == kind] or [0.0]
        )

    return median_of_processes


def has_passed(counts: SoakCounts, changes: Sequence[Change], residue: Residue) -> bool:
    complete = not counts.lost and not counts.different and residue.is_empty
    return complete and bool(changes) and all(change.passed for change in changes)


def show(verdict: SoakVerdict, console: Console) -> None:
    counts = verdict.counts
    table = table_of("", "a quarter of the way", "end", "change", f"at most {MAX_GROWTH:.0%}")
    for change in verdict.changes:
        met = ("[green]met[/]" if change.passed else "[red]missed[/]") if change.judged else NONE
        cells = (
            f"{value:.1f} {change.unit}".strip() if change.unit == "MiB" else f"{value:g}"
            for value in (change.quarter, change.end)
        )
        table.add_row(change.name, *cells, f"{change.growth:+.1%}", met)
    console.print(
        titled(
            f"{verdict.requests} requests in {verdict.seconds / 60:.1f} minutes, "
            f"{len(verdict.kills)} kills",
            table,
        )
    )
    line = (
        f"{counts.answered} answered, {counts.aborted} aborted, {counts.lost} lost, "
        f"{counts.different} different, "
        f"{counts.gateway_changes} resumed at another gateway, {counts.refusals} refused with "
        "503 and sent again"
    )
    console.print(line, highlight=False, soft_wrap=True)
    if not verdict.changes:
        console.print("there is no sample to compare: the soak was too short", style="red")
    if not verdict.complete:
        console.print(
            f"stopped after {verdict.seconds / 60:.0f} minutes, before all requests were sent",
            style="red",
        )
    if not verdict.residue.is_empty:
        console.print(
            f"left at the end: {verdict.residue}",
            style="red",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    for failure in counts.first_failures:
        console.print(failure, style="red", highlight=False, soft_wrap=True, markup=False)
    colour, word = ("green", "passed") if verdict.passed else ("red", "failed")
    console.print(
        f"[{colour}]soak {word}[/] ({verdict.concurrency} requests at a time, seed {verdict.seed})",
        highlight=False,
    )


def draw(verdict: SoakVerdict, path: Path) -> None:
    samples = verdict.samples
    kinds = sorted({process.kind for sample in samples for process in sample.processes} - {KEEPER})
    at_s = [sample.at_s for sample in samples]

    def panel(title: str, lines: dict[str, list[float]]) -> Callable[[Axes], None]:
        def draw_panel(axes: Axes) -> None:
            for name, values in lines.items():
                axes.plot(at_s, values, label=name, linewidth=1)
            for kill_s, _ in verdict.kills:
                axes.axvline(kill_s, color="#dc2626", linewidth=0.4, alpha=0.5)
            axes.set(title=title, xlabel="s")
            axes.title.set_fontsize(9)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=6)

        return draw_panel

    def by_kind(value: Callable[[ProcessSample], float]) -> dict[str, list[float]]:
        return {kind: [_of(kind, value)(sample) for sample in samples] for kind in kinds}

    panels = (
        panel(
            "Redis: memory, MiB", {"used memory": [sample.redis_bytes / MIB for sample in samples]}
        ),
        panel("Redis: keys", {"keys": [float(sample.keys) for sample in samples]}),
        panel(
            "RSS of a process, MiB; red: a kill", by_kind(lambda process: process.rss_bytes / MIB)
        ),
        panel("PSS of a process, MiB", by_kind(lambda process: process.pss_bytes / MIB)),
        panel("open files of a process", by_kind(lambda process: process.files)),
        panel("threads of a process", by_kind(lambda process: process.threads)),
    )
    draw_panels(panels, path, f"soak of {verdict.requests} requests, {verdict.began}", PANEL_INCHES)
