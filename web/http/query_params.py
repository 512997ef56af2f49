"""Values of query parameters, each checked against its limits. Knows no route."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from fleet.core.errors import BadInput


def choice_param(params: Mapping[str, str], name: str, known: Sequence[str]) -> str:
    """Return the query parameter `name`, "" if absent. Raises: BadInput listing the values in
    `known`.
    """
    value = params.get(name, "")
    if value and value not in known:
        raise BadInput(f"{name}: {value[:40]!r} is none of {', '.join(known)}", param=name)
    return value


def int_param(
    params: Mapping[str, str], name: str, default: int, most: int, *, least: int = 0
) -> int:
    """Return the query parameter `name` as a number from `least` to `most`; `default` if absent.

    Raises: BadInput naming the limits.
    """
    value = params.get(name, "")
    if not value:
        return default
    if not (
        value.isascii() and value.isdecimal() and len(value) < 19 and least <= int(value) <= most
    ):
        raise BadInput(
            f"{name}: {value[:40]!r} is not a whole number from {least} to {most}", param=name
        )
    return int(value)


def time_param(params: Mapping[str, str], name: str) -> int:
    """Return the query parameter `name`, an ISO 8601 time with its zone, in microseconds since
    1970; 0 if absent. Raises: BadInput with an example.
    """
    value = params.get(name, "")
    if not value:
        return 0
    try:
        # an unescaped plus sign of a query is a space
        found = datetime.fromisoformat(value.replace(" ", "+"))
        us = round(found.timestamp() * 1e6) if found.tzinfo is not None else 0
    except (ValueError, OverflowError):
        us = 0
    if us <= 0:
        raise BadInput(
            f"{name}: {value[:40]!r} is not a time with its zone after 1970; use one such as "
            "2026-11-30T18:13:00Z",
            param=name,
        )
    return us
