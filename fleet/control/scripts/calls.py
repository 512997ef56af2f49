"""Script calls as data. `fleet.control.connect` loads the Lua scripts and sends the calls."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib import resources
from itertools import chain
from typing import Any, ParamSpec, cast

from fleet.control.lua_source import source

Arg = str | bytes | int
Value = Arg | None | Sequence[object] | Mapping[Any, Arg]
P = ParamSpec("P")

SCRIPTS = tuple(
    sorted(
        file.name.removesuffix(".lua")
        for file in (resources.files("fleet.control") / "lua").iterdir()
        if file.name.endswith(".lua")
    )
)


@cache
def sha(name: str) -> str:
    """Return the hash by which Redis names a loaded script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a Lua script, ready to send."""

    script: str
    args: tuple[Arg, ...]

    @classmethod
    def of(cls, script: str, *values: Value) -> "Call":
        """Build a call of `script` from Python values, in the order of the script's ARGV.

        True becomes "1", False and None "". Sequences and mappings are flattened.
        """
        return cls(script, tuple(chain.from_iterable(map(_args, values))))


def script(declared: Callable[P, Call]) -> Callable[P, Call]:
    """Turn a function declaration without a body into a function that returns a call of the script
    with the same name. The declaration's parameters are the script's ARGV, in order.
    """
    parameters = inspect.signature(declared).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}

    @wraps(declared)
    def call(*args: P.args, **options: P.kwargs) -> Call:
        values: dict[str, Any] = defaults | dict(zip(parameters, args, strict=False)) | options
        return Call.of(declared.__name__, *values.values())

    return call


def _args(value: Any) -> Iterable[Arg]:
    if value is None or isinstance(value, bool):
        return ("1" if value else "",)
    if isinstance(value, str | bytes | int):
        return (value,)
    parts = value.items() if isinstance(value, Mapping) else value
    return chain.from_iterable(map(_args, cast("Iterable[object]", parts)))
