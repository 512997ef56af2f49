"""Part of `fleet status` about divided models: a table for each route, and a line for each span
worker without a route.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fleet.core.byte_sizes import format_byte_size
from fleet.telemetry.routes import HopView, RouteView, SpanRoutes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

BAR_WIDTH = 7
LEGEND = (
    "█ compute, ▒ wait, ░ send: means per pass; the longest bar is the process in which a "
    "pass is longest"
)


def route_tables(spans: SpanRoutes) -> "Iterator[RenderableType]":
    """Yield a title and a table per route, a legend, and a line per span worker that belongs to no
    route. Yields nothing for a fleet without divided models.
    """
    for route in spans.routes:
        yield from (*_title(route), _table(route))
    if spans.routes:
        yield LEGEND
    for free in spans.unused:
        loaded = f"; it has loaded layers {free.span}" if free.span else ""
        yield f"in no route: {free.worker}: {free.reason}{loaded}"


def _title(route: RouteView) -> "Iterator[Text]":
    from rich.text import Text

    yield Text(f"\nroute of {route.anchor}", style="bold")
    if route.gap:
        yield Text(route.gap, style="red")
    if route.pass_us is not None and route.between_us is not None:
        between = f"{duration(route.between_us)} of it between processes"
        yield Text(
            f"a pass takes {duration(route.pass_us)}, {between} (mean of the last "
            f"{route.num_recent})"
        )


def _table(route: RouteView) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layers\nworker", overflow="fold")
    table.add_column("weights\nrows", justify="right", no_wrap=True)
    table.add_column("of a\npass", no_wrap=True)
    for heading in ("compute", "wait", "send"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("in\nout", justify="right", no_wrap=True)
    for hop in route.hops:
        table.add_row(*_cells(hop, route.longest_us))
    return table


def _cells(hop: HopView, longest_us: int) -> "tuple[Text, ...]":
    """Return the table cells of a process in a route, each with two lines. `longest_us`: longest
    step time of the route, which fills the bar.
    """
    from rich.text import Text

    if not hop.worker:
        return Text(f"{hop.span}\nno worker", style="red"), *[Text("-")] * 6
    state = "" if hop.state == "ready" else f" ({hop.state})"
    return (
        Text(f"{hop.span}{' anchor' if hop.is_anchor else ''}\n{hop.worker}{state}"),
        Text(f"{format_byte_size(hop.weight_bytes)}\n{hop.num_rows}"),
        Text("-" if hop.share is None else f"{_bar(hop, longest_us)}\n{hop.share:.0f} %"),
        Text(duration(hop.computed_us) + ("\nmost" if hop.computes_most else "")),
        Text(duration(hop.waited_us)),
        Text(duration(hop.sent_us)),
        Text(f"{format_byte_size(hop.received_bytes)}\n{format_byte_size(hop.sent_bytes)}"),
    )


def _bar(hop: HopView, longest_us: int) -> str:
    """Return a bar of a process's computing, waiting and sending time in a step. Cumulative times
    are rounded, so the bar's length is the rounded sum.
    """
    bar, spent_us = "", 0
    for mark, us in (("█", hop.computed_us), ("▒", hop.waited_us), ("░", hop.sent_us)):
        spent_us += us or 0
        bar += mark * (round(BAR_WIDTH * spent_us / max(1, longest_us)) - len(bar))
    return bar


def duration(us: int | None) -> str:
    """Format microseconds with three digits: `830 us`, `1.25 ms`, `12.3 s`; `-` for None."""
    if us is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}" if us < 1000 * size else f"{us / size:.0f} {unit}"
    return f"{us} us"
