"""The result of one measurement, which declares its part of a report. Measures nothing."""

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType

from fleet.reporting.plot import Panel
from fleet.reporting.stats import Ratio, Summary
from fleet.reporting.tables import NONE, figure, table_of, titled

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
        """Return the background load of each part of the measurement, in cores, as far as it is known."""
        return ()


def cells(summary: Summary | None, scale: float = 1.0) -> tuple[str, str]:
    """Return the cells of the median and of the 95th percentile."""
    return (NONE, NONE) if summary is None else (figure(summary.p50 * scale), figure(summary.p95 * scale))


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
