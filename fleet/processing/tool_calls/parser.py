"""Incremental parser of function calls in an answer's text. Pure: any division of the text into
pieces gives the same calls. Knows no tokens.

Invariants: a call begins only where a whole beginning of the form stands, with the name of a
function that may be called; all other text before the first call is what the answer says. What
stands after the first call and is no call is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import regex

from fleet.core.request import ToolUse
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.python_arguments import json_of_arguments


@dataclass(frozen=True, slots=True)
class Said:
    """Text before the first call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call has begun. `index`: number of the call in the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of a call are complete. A call that is cut off by the answer's end has no such
    event.
    """

    index: int


CallEvent = Said | CallBegun | CallArguments | CallEnded
_CLOSING = {"{": "}", "[": "]", "(": ")"}


class _Brackets:
    """Finds the end of a text in brackets. `quotes`: characters that delimit strings."""

    def __init__(self, quotes: str) -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Read the next part of the text; return the position after the closing bracket in this
        part, or None if the bracket is still open at the part's end.
        """
        for place, char in enumerate(text):
            if self._quote:
                ends = char == self._quote and not self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
                self._quote = "" if ends else self._quote
            elif char in self._quotes:
                self._quote = char
            elif char in _CLOSING:
                self._depth += 1
            elif char in _CLOSING.values():
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


class CallParser:
    """Parser of one answer. Text that may be the beginning of a call is held back until more text
    decides.
    """

    def __init__(self, tools: ToolUse) -> None:
        self._format = FORMATS[tools.format]
        self._max_calls = tools.max_calls
        self._opening = self._format.pattern(tools.names, is_first=True)
        self._following = self._format.pattern(tools.names, is_first=False)
        self._held = ""
        self._brackets: _Brackets | None = None
        """Set while the arguments of a call are read."""
        self._name = ""
        self._beginning, self._python = "", ""
        """Text before the arguments of a call in Python's form, and its arguments so far: only a
        whole call shows that it is one.
        """
        self.num_calls = 0
        """Number of calls that have begun."""

    def add(self, text: str) -> list[CallEvent]:
        """Add the next part of the text; return what no later text can change."""
        self._held += text
        return list(self._read(is_whole=False))

    def finish(self) -> list[CallEvent]:
        """Return what was held back, after the last part of the text."""
        return list(self._read(is_whole=True))

    def _read(self, *, is_whole: bool) -> Iterator[CallEvent]:
        while True:
            brackets = self._brackets
            if brackets is not None:
                read = self._read_python if self._format.is_python else self._read_json
                yield from read(brackets, is_whole=is_whole)
                if self._brackets is not None:
                    return
            found = None
            if not self._max_calls or self.num_calls < self._max_calls:
                expression = self._following if self.num_calls else self._opening
                found = expression.search(self._held, partial=not is_whole)
            begin = len(self._held) if found is None else found.start()
            said, self._held = self._held[:begin], self._held[begin:]
            if said and not self.num_calls:
                yield Said(said)
            if found is None or found.partial:
                return
            yield from self._begin(found)

    def _begin(self, found: "regex.Match[str]") -> Iterator[CallEvent]:
        self._name, self._beginning = found["name"], found[0]
        self._held = self._held[len(self._beginning) :]
        if self._format.is_python:
            self._brackets, self._python = _Brackets("\"'"), ""
            return
        yield self._count()
        if found["bare"]:
            yield from self._ended("{}")
        else:
            self._brackets = _Brackets('"')

    def _count(self) -> CallBegun:
        self.num_calls += 1
        return CallBegun(self.num_calls - 1, self._name)

    def _ended(self, arguments: str) -> Iterator[CallEvent]:
        yield CallArguments(self.num_calls - 1, arguments)
        yield CallEnded(self.num_calls - 1)

    def _read_json(self, brackets: _Brackets, *, is_whole: bool) -> Iterator[CallEvent]:
        part, has_ended = self._take_arguments(brackets)
        if part:
            yield CallArguments(self.num_calls - 1, part)
        if has_ended:
            yield CallEnded(self.num_calls - 1)

    def _read_python(self, brackets: _Brackets, *, is_whole: bool) -> Iterator[CallEvent]:
        part, has_ended = self._take_arguments(brackets)
        self._python += part
        if not has_ended and not is_whole:
            return
        arguments = json_of_arguments(self._python) if has_ended else None
        if arguments is not None:
            yield self._count()
            yield from self._ended(arguments)
        elif not self.num_calls:
            yield Said(self._beginning + self._python)

    def _take_arguments(self, brackets: _Brackets) -> tuple[str, bool]:
        """Take the next part of a call's arguments from the text; return True with the last one."""
        end = brackets.end_in(self._held)
        if end is None:
            part, self._held = self._held, ""
            return part, False
        part, self._held, self._brackets = self._held[:end], self._held[end:], None
        return part, True
