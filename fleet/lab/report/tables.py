"""Tables on the terminal, of one look. Knows no number's meaning."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

NONE = "-"


def titled(title: str, table: Table) -> Group:
    """Put a title above a table; rich's own title would be wrapped to the table's width."""
    return Group(Text(title, style="bold"), table)


def table_of(*columns: str) -> Table:
    """Make an empty table whose first column is text and whose others are numbers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def figure(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def target_cells(target: float, unit: str, *, at_most: bool, met: bool | None) -> tuple[str, str]:
    """Return the cells of a target and of its verdict."""
    return (
        f"{'<=' if at_most else '>='} {target:g}{unit}",
        "[green]met[/]" if met else "[red]missed[/]",
    )


def bar_of(share: float, width: int = 10) -> str:
    """Return a picture of a share as a bar of `width` characters; a share above 1 fills it."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
