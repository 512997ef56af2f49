"""Table of the forms in which model families write function calls; a form is found from the
checkpoint's chat template.

Sources: chat templates of the named families; vllm 0.32, `vllm/tool_parsers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import regex

_JSON = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"NAME"\s*'
    r'(?:,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)|(?P<bare>\}))'
)
"""Pattern of a call as a JSON object, up to the value of its arguments. The group `bare` matches if
the object has no arguments.
"""
_TAG = r"<tool_call>\s*(?:\[\s*)?"
_MISTRAL = (
    rf"\[TOOL_CALLS\]\s*(?:\[\s*{_JSON}|"
    r"NAME\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{))"
)
_PYTHON = r"NAME\s*(?=\()"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A form of function calls.

    `opening`, `following`: regular expressions of the text before the arguments of the first and of
    a further call; `NAME` stands for the names of functions. `is_python`: arguments are written as
    in Python, otherwise as JSON. `markers`: control tokens that belong to calls, which other texts
    of answers leave out. `signs`: texts of a chat template, any of which shows the form.

    `begin`, `between`, `end`: texts around and between the calls that a grammar enforces. `before`,
    `after`: texts around the arguments of one call, with `NAME` for its name. `allows_several`:
    False if a template of the family cannot write two calls of one message. `has_short_ids`: the
    template takes ids of nine letters and digits only.
    """

    name: str
    opening: str
    following: str
    signs: tuple[str, ...]
    is_python: bool = False
    markers: tuple[str, ...] = ()
    begin: str = ""
    between: str = ""
    end: str = ""
    before: str
    after: str
    allows_several: bool = True
    has_short_ids: bool = False

    def pattern(self, names: Sequence[str], *, is_first: bool) -> "regex.Pattern[str]":
        """Return the compiled expression of the text before the arguments of a call."""
        source = self.opening if is_first else self.following
        options = "|".join(map(regex.escape, names))
        return regex.compile(source.replace("NAME", f"(?P<name>{options})"))


_FORMATS = (
    CallFormat(
        name="mistral_args",
        signs=("[ARGS]",),
        opening=rf"\s*{_MISTRAL}",
        following=rf"\s*{_MISTRAL}|,\s*{_JSON}",
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        before="[TOOL_CALLS]NAME[ARGS]",
        after="",
        has_short_ids=True,
    ),
    CallFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        opening=rf"\s*{_MISTRAL}",
        following=rf"\s*{_MISTRAL}|,\s*{_JSON}",
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        begin="[TOOL_CALLS][",
        before='{"name": "NAME", "arguments": ',
        after="}",
        between=", ",
        end="]",
        has_short_ids=True,
    ),
    CallFormat(
        name="hermes",
        signs=("<tool_call>",),
        opening=rf"\s*{_TAG}{_JSON}",
        following=rf"(?:\s*{_TAG}|,\s*){_JSON}",
        markers=("<tool_call>", "</tool_call>"),
        before='<tool_call>\n{"name": "NAME", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
    CallFormat(
        name="llama3",
        signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
        opening=rf"\s*(?:<\|python_tag\|>\s*)?{_JSON}",
        following=rf"\s*;\s*{_JSON}",
        markers=("<|python_tag|>",),
        before='{"name": "NAME", "parameters": ',
        after="}",
        allows_several=False,
    ),
    CallFormat(
        name="pythonic",
        signs=("[func_name1(", "<|python_start|>"),
        opening=rf"\s*(?:<\|python_start\|>\s*)?\[\s*{_PYTHON}",
        following=rf"\s*,\s*{_PYTHON}",
        is_python=True,
        markers=("<|python_start|>", "<|python_end|>"),
        begin="[",
        before="NAME",
        after="",
        between=", ",
        end="]",
    ),
    CallFormat(
        name="json",
        signs=(),
        opening=rf"\s*(?:```(?:json)?\s*)?(?:\[\s*)?{_JSON}",
        following=rf"\s*(?:,|```(?:json)?)?\s*(?:\[\s*)?{_JSON}",
        before='{"name": "NAME", "arguments": ',
        after="}",
        begin="[",
        between=", ",
        end="]",
    ),
)
FORMATS = {format.name: format for format in _FORMATS}
"""Every form by its name, in the order in which they are looked for."""
_UNREAD = (
    "<function=",
    "<｜tool▁calls▁begin｜>",
    "<|channel|>",
    "<arg_key>",
    "<|tool_calls_section",
)
"""Texts of templates whose calls have other forms, which are not read."""


def format_of(template: str) -> str:
    """Return the name of the form in which a model writes calls, found from the source of a chat
    template that writes tools: "json" if no form shows, "" for a form that is not read.
    """
    if any(sign in template for sign in _UNREAD):
        return ""
    found = (name for name, each in FORMATS.items() if any(sign in template for sign in each.signs))
    return next(found, "json")
