"""Script calls as data. `fleet.control.connect` loads the Lua and sends them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

from fleet.control.lua_source import source

Arg = str | bytes | int
Value = Arg | bool | None | tuple[Arg, ...] | list[str] | Mapping[Any, Arg]

SCRIPTS = tuple(
    sorted(
        file.name.removesuffix(".lua")
        for file in (resources.files("fleet.control") / "lua").iterdir()
        if file.name != "common.lua"
    )
)


@cache
def sha(name: str) -> str:
    """Return the hash by which Redis names a loaded script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script, ready to send."""

    script: str
    args: tuple[Arg, ...]

    @classmethod
    def of(cls, script: str, *values: Value) -> "Call":
        """Build a call from Python values, in the order of the script's ARGV.

        True becomes "1", False and None "". A sequence or mapping becomes one argument per item,
        or two per pair.
        """
        return cls(script, tuple(chain.from_iterable(map(_args, values))))


def _args(value: Value) -> tuple[Arg, ...]:
    if value is None or isinstance(value, bool):
        return ("1" if value else "",)
    if isinstance(value, str | bytes | int):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(chain.from_iterable(value.items()))
    return tuple(value)
