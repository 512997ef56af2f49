"""Tables for the terminal in a uniform style. Formats numbers without knowing what they mean."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fleet.lab.report.stats import Ratio, Summary

NONE = "-"


def titled(title: str, table: Table) -> Group:
    """Return a table under a title; rich's own title would be wrapped to the table's width."""
    return Group(Text(title, style="bold"), table)


def table_of(*columns: str) -> Table:
    """Return an empty table. `columns`: headings; the first column is text, the others are
    numbers.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def figure(value: float | None) -> str:
    """Format a number with three significant digits; "-" for None."""
    if value is None:
        return NONE
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figures(*values: float | None) -> list[str]:
    """Format several numbers as table cells, with three significant digits."""
    return [figure(value) for value in values]


def cells(summary: Summary | None, scale: float = 1.0) -> list[str]:
    """Return table cells with the median and the 95th percentile, multiplied by `scale`."""
    return cells_and_high(summary, scale)[:2]


def cells_and_high(summary: Summary | None, scale: float = 1.0) -> list[str]:
    """Return table cells with the median, the 95th percentile and the maximum, multiplied by
    `scale`.
    """
    if summary is None:
        return [NONE] * 3
    return figures(summary.p50 * scale, summary.p95 * scale, summary.high * scale)


def summary_table(title: str, unit: str, rows: Iterable[tuple[str, Summary | None]]) -> Group:
    """Return a table with a row for each named summary; rows without samples are left out."""
    table = table_of(unit, "p50", "p95", "max")
    for name, summary in rows:
        if summary:
            table.add_row(name, *cells_and_high(summary))
    return titled(title, table)


def ratio_table(ratios: Iterable[Ratio]) -> Group:
    """Return the table of the numbers that have a target, with verdicts."""
    table = table_of("", "measured", "target", "")
    for ratio in ratios:
        unit = "" if ratio.unit == "x" else f" {ratio.unit}"
        target = target_cells(ratio.target, unit, at_most=ratio.at_most, met=ratio.met)
        table.add_row(ratio.name, f"{figure(ratio.value)}{unit}", *target)
    return titled("targets", table)


def target_cells(target: float, unit: str, *, at_most: bool, met: bool | None) -> tuple[str, str]:
    """Return two table cells: the target, and "met" or "missed". `met` is None if nothing was
    measured, which counts as missed.
    """
    return (
        f"{'<=' if at_most else '>='} {target:g}{unit}",
        "[green]met[/]" if met else "[red]missed[/]",
    )


def bar_of(share: float, width: int = 10) -> str:
    """Draw a share from 0 to 1 as a text bar of `width` characters; a share above 1 fills the
    bar.
    """
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line of text, wrapped by the terminal and not by rich."""
    console.print(line, style=style, highlight=False, soft_wrap=True)
