"""Amounts of memory in text form, such as 900MiB, 2GB or 1.5GiB. Pure."""

import re

from fleet.core.errors import ConfigError

_DECIMAL, _BINARY = ("KB", "MB", "GB", "TB"), ("KiB", "MiB", "GiB", "TiB")
_UNITS = (
    {"B": 1}
    | {unit: 1000**power for power, unit in enumerate(_DECIMAL, start=1)}
    | {unit: 1024**power for power, unit in enumerate(_BINARY, start=1)}
)
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}
_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")
KIB, MIB = 1 << 10, 1 << 20


def parse_byte_size(text: str, param: str) -> int:
    """Parse an amount of memory; return its bytes, at least 1. `param`: name of the parameter in
    the error. Raises: ConfigError with the accepted forms.
    """
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    size = _BY_LOWER_CASE.get(found[2].lower()) if found is not None else None
    num_bytes = int(float(found[1]) * size) if found is not None and size is not None else 0
    if num_bytes < 1:
        raise ConfigError(
            f"{param}: {text!r:.40} is no amount of memory; write a number with a unit, such as "
            "900MiB, 2GB or 1.5GiB "
            f"({', '.join(_UNITS)})",
            param=param,
        )
    return num_bytes


def format_byte_size(num_bytes: int) -> str:
    """Return a number of bytes with three digits, in the largest binary unit that it reaches: `1.31
    GiB`, `96 B`.
    """
    for unit in reversed(_BINARY):
        if num_bytes >= _UNITS[unit]:
            amount = num_bytes / _UNITS[unit]
            return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"
    return f"{num_bytes} B"


def option_of_byte_size(num_bytes: int) -> str:
    """Return `num_bytes`, rounded up to whole KiB or MiB, as text for `parse_byte_size`."""
    unit, size = ("MiB", MIB) if num_bytes >= 16 * MIB else ("KiB", KIB)
    return f"{-(-num_bytes // size)}{unit}"
