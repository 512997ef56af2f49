"""The text of the Lua scripts: each script with the definitions of `lua/common/` that it uses,
and with the tables of `fleet.conductor.states` as Lua tables. Knows no call.

Redis runs the whole text of a script at each call, so each definition in the text costs time, even
if unused: all of them together took five times as long as the commands of an append.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fleet.conductor.states import REQUEST_MOVES, TASK_MOVES
from fleet.control.undeclared_keys import UNDECLARED_FLAG

_DEFINITION = re.compile(r"local (?:function (?P<function>\w+)|(?P<values>\w+(?:, \w+)*) = )")
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"^ *-- .*\n", re.MULTILINE)
COMMON = (
    "basics",
    "logs",
    "workers",
    "tasks",
    "parking",
    "quotas",
    "sessions",
    "shares",
    "endings",
    "losses",
    "admission",
)
"""Files of `lua/common/`, each of which uses definitions of itself and of those before it."""
REST = "--rest\n"
"""Marker line in a script, after which the lines rarely run. See `source`."""


class _Definition(NamedTuple):
    """A function of `lua/common/`, or a line of constants: the names that it defines, and its Lua
    text.
    """

    names: frozenset[str]
    text: str


@cache
def source(name: str) -> str:
    """Return the Lua text of a script: first the flag for servers that require it, then the common
    definitions that the script uses, then the script.

    Definitions that only the lines after the marker `REST` use are inserted at the marker, so that
    a call that does not get there does not run them. If the marker is inside a block of Lua, these
    definitions are unknown after the end of the block.
    """
    head, found, rest = read(name).partition(REST)
    return UNDECLARED_FLAG + (with_definitions(head, rest) if found else with_definitions(head))


def with_definitions(*parts: str) -> str:
    """Return Lua text, each part of it behind the common definitions that it uses."""
    text, defined = "", set[_Definition]()
    for part in parts:
        wanted, used = _words(part), list[_Definition]()
        for definition in reversed(_common()):  # each uses only earlier ones
            if definition.names & wanted:
                wanted |= _words(definition.text)
                used.append(definition)
        text += "".join(each.text for each in reversed(used) if each not in defined) + part
        defined.update(used)
    return text


@cache
def _common() -> tuple[_Definition, ...]:
    """Return the definitions in `lua/common/`, each of which begins at the start of a line."""
    text = "".join(read(f"common/{name}").lstrip() for name in COMMON)
    parts = re.split(r"^(?=local )", text, flags=re.MULTILINE)
    tables = {"task_moves": TASK_MOVES, "request_moves": REQUEST_MOVES}
    return (
        *(_Definition(frozenset({name}), _table(name, of)) for name, of in tables.items()),
        *(_Definition(_names(part), part) for part in parts if part),
    )


def _table(name: str, moves: Mapping[Any, Mapping[Any, str]]) -> str:
    """Return a Lua function that returns a table of tables. A script that has the function builds
    the tables when it first calls it, which not every call of the script does.
    """
    rows: list[str] = []
    for key, row in moves.items():
        entries = ", ".join(f"['{state}'] = '{after}'" for state, after in row.items())
        rows.append(f"['{key}'] = {{{entries}}}")
    table = f"{{{', '.join(rows)}}}"
    return (
        f"local all_{name} = nil\n"
        f"local function {name}() all_{name} = all_{name} or {table}; return all_{name} end\n"
    )


def _names(part: str) -> frozenset[str]:
    found = _DEFINITION.match(part)
    assert found is not None, f"lua/common: a part defines nothing: {part[:60]!r}"
    return frozenset((found["function"] or found["values"]).split(", "))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text))


def read(name: str) -> str:
    """Return the text of a script file without its comments."""
    return _COMMENT.sub("", (resources.files("fleet.control") / "lua" / f"{name}.lua").read_text())
