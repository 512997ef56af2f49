"""Formatting of fields and values in error messages, and suggestions for misspelt names. Knows no
field.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_CUTOFF = 0.6
_SHOWN_CHARS = 60
_HUGE_BITS = 256
_YAML_WORDS = {None: "null", True: "true", False: "false"}


def join_path(path: Sequence[str | int]) -> str:
    """Return a field's path as the user writes it: `("web", "port")` is `web.port`. A part that is
    not a plain word is quoted.
    """
    return ".".join(_plain(str(part)) for part in path)


def _plain(part: str) -> str:
    return (
        part
        if part and part.isprintable() and " " not in part and len(part) <= _SHOWN_CHARS
        else repr(part)[:_SHOWN_CHARS]
    )


def format_value(value: object) -> str:
    """Return a value as one short line."""
    if value is None or isinstance(value, bool):
        return _YAML_WORDS[value]
    if isinstance(value, int) and value.bit_length() > _HUGE_BITS:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list | tuple | set):
        return (
            f"a list of {len(value)}"
            if not isinstance(value, dict)
            else f"a section of {len(value)} keys"
        )
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def find_nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelt one, ignoring case; None if none
    is.
    """
    by_lower = {one.lower(): one for one in known}
    near = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=_CUTOFF)
    return by_lower[near[0]] if near else None


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for a misspelt name, X being the most similar known name; "" if no
    name is similar.
    """
    near = find_nearest(name, known)
    return f"; did you mean {near}?" if near else ""
