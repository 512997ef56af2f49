"""The result of one measurement, which declares its part of a report. Measures nothing."""

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console, Group, RenderableType

from fleet.lab.report.machine import Machine
from fleet.lab.report.plot import Panel
from fleet.lab.report.stats import Ratio, Summary
from fleet.lab.report.tables import NONE, figure, table_of, target_cells, titled

MS = 1e3
FLEET, MANY, OTHER, TWIN, PLAYED = "#2563eb", "#0d9488", "#b45309", "#7c3aed", "#6b7280"
"""Colours of the panels."""
P95_ALPHA = 0.4


class Result(msgspec.Struct, frozen=True):
    """Outcome of one measurement, and how a report shows and judges it."""

    def tables(self) -> Iterable[RenderableType]:
        """Return the tables of the terminal, in order."""
        return ()

    def panels(self) -> Sequence[Panel]:
        """Return the panels of the picture, in order."""
        return ()

    def targets(self) -> Sequence[Ratio]:
        """Return the numbers that have a target."""
        return ()

    def background_loads(self) -> Sequence[float | None]:
        """Return the background load of each part of the measurement, in cores, as far as it is
        known.
        """
        return ()


def differing(num_equal: int, num_answers: int) -> Ratio:
    """Return the target that no answer differs from the one it is compared with."""
    return Ratio(
        name="differing answers",
        value=num_answers - num_equal,
        target=0,
        at_most=True,
        unit="answers",
    )


def cells(summary: Summary | None, scale: float = 1.0) -> tuple[str, str]:
    """Return the cells of the median and of the 95th percentile."""
    return (
        (NONE, NONE)
        if summary is None
        else (figure(summary.p50 * scale), figure(summary.p95 * scale))
    )


def cells_and_high(summary: Summary | None, scale: float = 1.0) -> tuple[str, str, str]:
    """Return the cells of the median, the 95th percentile and the maximum."""
    return *cells(summary, scale), figure(summary.high * scale if summary else None)


def summary_table(title: str, unit: str, rows: Iterable[tuple[str, Summary | None]]) -> Group:
    """Make a table of the rows that have samples."""
    table = table_of(unit, "p50", "p95", "max")
    for name, summary in rows:
        if summary:
            table.add_row(name, *cells_and_high(summary))
    return titled(title, table)


def machine_line(machine: Machine) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB, load "
        f"{machine.load_1min} before; "
        f"Python {machine.python}, {libraries}"
    )


def ratio_table(ratios: Iterable[Ratio]) -> Group:
    """Make the table of the numbers that have a target."""
    table = table_of("", "measured", "target", "")
    for ratio in ratios:
        unit = "" if ratio.unit == "x" else f" {ratio.unit}"
        target = target_cells(ratio.target, unit, at_most=ratio.at_most, met=ratio.met)
        table.add_row(ratio.name, f"{figure(ratio.value)}{unit}", *target)
    return titled("targets", table)


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line that the terminal wraps."""
    console.print(line, style=style, highlight=False, soft_wrap=True)
