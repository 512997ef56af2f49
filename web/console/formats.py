"""Numbers as people read them: with a unit, and no more digits than mean something. Knows no page."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

NOTHING = "–"
"""What stands where there is no number yet: never a zero that nobody measured."""


def ms(value: float | None) -> str:
    """`value` in milliseconds."""
    if value is None:
        return NOTHING
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 10_000 else seconds(value / 1000)


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
    """`value` in bytes; decimal units, as links are measured."""
    if value is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(value: float | None) -> str:
    """Whole numbers with thin groups, others with one digit."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}".replace(",", "\u202f") if float(value).is_integer() else f"{value:.1f}"


def rate(value: float | None) -> str:
    """`value` per second."""
    if value is None:
        return NOTHING
    return f"{value:.0f} /s" if value >= 10 else f"{value:.1f} /s"


def ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """`value` of 1."""
    return NOTHING if value is None else f"{value * 100:.0f} %"


def clock(us: int | None) -> str:
    """The time of day in UTC, of microseconds since 1970."""
    return NOTHING if not us else _moment(us).strftime("%H:%M:%S")


def stamp(us: int | None) -> str:
    """Date and time in UTC, to the millisecond."""
    return NOTHING if not us else _moment(us).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _moment(us: int) -> datetime:
    return datetime.fromtimestamp(us / 1e6, UTC)


FILTERS: dict[str, Callable[..., Any]] = {
    "ms": ms, "seconds": seconds, "size": size, "count": count, "rate": rate, "ratio": ratio, "percent": percent,
    "clock": clock, "stamp": stamp,
}  # fmt: skip
"""Jinja filters, by the name they have in templates."""
