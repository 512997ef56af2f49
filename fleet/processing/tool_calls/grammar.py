"""Grammars of answers with function calls: the calls in the model's own form, their arguments by
the JSON schema of each function.

Source: llguidance 1.9 (Lark with `%json` and token ids). Every added token of a tokenizer that
looks like `<...>` is a control token to it, whether it is special or not.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard, cast

from fleet.constraints.grammar import JSON_FORM
from fleet.core.request import Constraint
from fleet.processing.tool_calls.formats import CallFormat
from fleet.processing.tool_calls.tools import FunctionTool

MAX_CALLS = 16
"""Most calls of one answer that a grammar allows, so that a model cannot call without end."""
ANY_TEXT = r"/(.|\n)+/"
NO_CALL = r"/[^\s<{\[`](.|\n)*/"
"""Text that begins like no call, for models whose calls begin with no control token."""


class CallGrammar:
    """Builder of the grammar of one request.

    `tokens`: ids of the tokenizer's added tokens by their texts. `spoken`: ids of the added tokens
    that may be part of ordinary text.
    """

    def __init__(
        self, form: CallFormat, tokens: Mapping[str, int], spoken: Sequence[int] = ()
    ) -> None:
        self._form = form
        self._markers = {each: tokens[each] for each in form.markers if each in tokens}
        self._spoken = [token for token in spoken if token not in self._markers.values()]
        self._rules: list[str] = []

    def required(self, tools: Sequence[FunctionTool], max_calls: int) -> Constraint:
        """Return the rule of an answer that calls `tools` at least once and at most `max_calls`
        times; 0 allows `MAX_CALLS` calls, or one call if the form cannot write several.
        """
        return self._rule(self._calls(tools, max_calls))

    def optional(
        self, tools: Sequence[FunctionTool], max_calls: int, schema: object = None
    ) -> Constraint:
        """Return the rule of an answer that may call `tools`, up to `max_calls` as in `required`.
        `schema`: JSON schema of an answer without calls; None allows any text, which may also
        precede the calls if these begin with a control token.
        """
        calls = self._calls(tools, max_calls)
        if schema is not None:
            return self._rule(f"{calls} | {self._json(schema)}")
        begins = self._form.begin + self._form.before
        if not any(begins.startswith(marker) for marker in self._markers):
            self._rules.append(f"SAID: {NO_CALL}")
            return self._rule(f"SAID? | {calls}")
        others = "".join(f" | <[{token}]>" for token in self._spoken)
        self._rules.append(f"SAID: {ANY_TEXT}")
        return self._rule(f"(SAID{others})* ({calls})?")

    def _rule(self, start: str) -> Constraint:
        return Constraint(kind="grammar", text="\n".join([f"start: {start}", *self._rules]))

    def _calls(self, tools: Sequence[FunctionTool], max_calls: int) -> str:
        form = self._form
        most = max_calls or (MAX_CALLS if form.allows_several else 1)
        calls = " | ".join(self._call(tool) for tool in tools)
        self._rules.append(f"call: {calls}")
        more = f"({self._text(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
        return f"{self._text(form.begin)} call {more} {self._text(form.end)}"

    def _call(self, tool: FunctionTool) -> str:
        before = self._text(self._form.before.replace("NAME", tool.name))
        read = self._keywords if self._form.is_python else self._json
        return f"{before} {read(tool.schema)} {self._text(self._form.after)}"

    def _json(self, schema: object) -> str:
        name = f"json_{len(self._rules)}"
        value = {**schema, "x-guidance": JSON_FORM} if _is_object(schema) else schema
        self._rules.append(f"{name}: %json {json.dumps(value, ensure_ascii=False)}")
        return name

    def _text(self, text: str) -> str:
        """Return a text as terms of the grammar, control tokens by their ids."""
        parts = re.split(f"({'|'.join(map(re.escape, self._markers))})", text)
        parts = parts if self._markers else [text]
        return " ".join(
            f"<[{self._markers[part]}]>" if part in self._markers else json.dumps(part)
            for part in parts
            if part
        )

    def _keywords(self, schema: Mapping[str, object]) -> str:
        """Return the terms of keyword arguments: the required ones in the order of `required`, then
        any others in the order of `properties`. The values are JSON, which the parser reads too.
        """
        named, wanted = schema.get("properties"), schema.get("required")
        names = cast("list[object]", wanted) if isinstance(wanted, list) else []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        terms = {
            name: f"{json.dumps(f'{name}=')} {self._json({**shared, **value})}"
            for name, value in (named.items() if _is_object(named) else ())
            if _is_object(value) and name.isidentifier()
        }
        needed = [terms[name] for name in map(str, names) if name in terms]
        others = [term for name, term in terms.items() if name not in names]
        if needed:
            rest = "".join(f' (", " {term})?' for term in others)
            first = ' ", " '.join(needed)
            return f'"(" {first}{rest} ")"'
        ways = (
            term + "".join(f' (", " {later})?' for later in others[place + 1 :])
            for place, term in enumerate(others)
        )
        return f'"(" ({" | ".join(ways)})? ")"' if others else '"()"'


def _is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)
