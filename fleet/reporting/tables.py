"""How the report's tables look. Knows no number's meaning."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

NONE = "-"


def titled(title: str, table: Table) -> Group:
    """A table's own title would be wrapped to its width."""
    return Group(Text(title, style="bold"), table)


def table_of(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def figure(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
