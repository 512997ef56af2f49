"""Formats numbers for people: with a unit, and no more digits than are meaningful."""

from collections.abc import Callable
from datetime import UTC, datetime

NOTHING = "–"
"""Shown in place of a number that was not measured."""


def ms(value: float | None) -> str:
    """Format milliseconds."""
    if value is None:
        return NOTHING
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 10_000 else seconds(value / 1000)


def us(value: float | None) -> str:
    """Format microseconds."""
    return (
        f"{value:.0f} µs"
        if value is not None and value < 1000
        else ms(None if value is None else value / 1000)
    )


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(value: float | None) -> str:
    """Format bytes in decimal units, as for network links."""
    if value is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(value: float | None) -> str:
    """Format a whole number with thin spaces between groups of digits; other numbers with one
    decimal.
    """
    if value is None:
        return NOTHING
    return f"{value:,.0f}".replace(",", "\u202f") if float(value).is_integer() else f"{value:.1f}"


def rate(value: float | None) -> str:
    """Format a number per second."""
    if value is None:
        return NOTHING
    return f"{value:.0f} /s" if value >= 10 else f"{value:.1f} /s"


def ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Format a fraction of 1."""
    return NOTHING if value is None else f"{value * 100:.0f} %"


def clock(us: int | None) -> str:
    """Format microseconds since 1970 as the time of day in UTC, with the zone."""
    return NOTHING if not us else _moment(us).strftime("%H:%M:%S UTC")


def stamp(us: int | None) -> str:
    """Format microseconds since 1970 as date and time in UTC, to the millisecond."""
    return NOTHING if not us else _moment(us).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def iso(us: int) -> str:
    """Format microseconds since 1970 as the value of a `datetime` attribute, to the millisecond."""
    return _moment(us).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def second(us: int) -> str:
    """Format microseconds since 1970 as a time in UTC to the second, as filters accept it."""
    return _moment(us).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(us: int) -> datetime:
    return datetime.fromtimestamp(us / 1e6, UTC)


FILTERS: tuple[Callable[..., str], ...] = (
    ms,
    us,
    seconds,
    size,
    count,
    rate,
    ratio,
    percent,
    clock,
    stamp,
    iso,
)
"""Functions of this module that templates use as Jinja filters, under the functions' names."""
