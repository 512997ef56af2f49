"""How a request's tools reach the model, the same for every route: in its prompt, as the rule of
its answer, and as what its answer may call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic_core import from_json

from fleet.core.errors import BadInput, UnsupportedValue
from fleet.core.request import Constraint, RequestSpec, ToolUse
from fleet.processing import Message
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.support import ToolSupport
from fleet.processing.tool_calls.tools import FunctionTool, ToolPrompt
from web.schema.answer_rules import MAX_RULE_CHARS, AnswerRule
from web.schema.chat import AnswerOptions
from web.schema.fields.chat import NEW_CHAT, NO_TOOLS
from web.schema.tools import ToolChoice, ToolFields, read_choice, read_tools
from web.schema.unserved import check_tool_choice

WARNED_FIELD = "tools"
"""Ignored field that the body of the answer also warns about; other ignored fields are named only
in the header `x-fleet-ignored`.
"""
IGNORED = "ignored_tools"
"""Key of `RequestSpec.reply` for the names of the ignored fields, separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """What a request's tools mean for its prompt and its answer. `prompt`: tools that the prompt
    describes. `rule`: rule of the answer; the request's own rule if the tools require none.
    `ignored`: fields without effect, since the model calls no functions.
    """

    prompt: ToolPrompt
    rule: AnswerRule | None = None
    ignored: tuple[str, ...] = ()

    @property
    def reply(self) -> dict[str, str]:
        """Entry for `RequestSpec.reply` with the ignored fields, so that every gateway can report
        those fields; empty if no field is ignored.
        """
        return {IGNORED: ",".join(self.ignored)} if self.ignored else {}


def ignored_tools(spec: RequestSpec) -> list[str]:
    """Return the fields about tools of a stored request that had no effect."""
    return [name for name in spec.reply.get(IGNORED, "").split(",") if name]


def read_tool_request(options: AnswerOptions, form: str, support: ToolSupport) -> ToolRequest:
    """Return what a request asks of its tools. `form`: format in which the model writes calls. If
    `form` is "", the model calls no functions, and tools are ignored unless a call is required.

    Raises: BadInput, UnsupportedValue naming the field.
    """
    if not isinstance(options, ToolFields):
        return ToolRequest(prompt=ToolPrompt(call_format=form), rule=options.rule)
    if not form:
        check_tool_choice("tool_choice", options.tool_choice)
        given = {"tools": options.tools, "parallel_tool_calls": options.parallel_tool_calls}
        ignored = tuple(sorted(name for name, value in given.items() if value))
        return ToolRequest(prompt=ToolPrompt(), rule=options.rule, ignored=ignored)
    tools = read_tools(options.tools, "tools")
    choice = read_choice(options.tool_choice, "tool_choice", tools)
    allowed = tuple(tool for tool in tools if choice.allows(tool))
    if choice.mode == "none" or not allowed:
        return ToolRequest(prompt=ToolPrompt(call_format=form), rule=options.rule)
    if options.num_logprobs is not None:
        raise UnsupportedValue("logprobs: not served beside tools", param="logprobs")
    is_single = options.parallel_tool_calls is False or choice.is_named
    max_calls = 1 if is_single or not FORMATS[form].allows_several else 0
    use = ToolUse(format=form, names=tuple(tool.name for tool in allowed), max_calls=max_calls)
    described = tools if choice.is_named else allowed
    return ToolRequest(
        prompt=ToolPrompt(call_format=form, described=described, use=use),
        rule=_rule(options.rule, choice, use, allowed, support),
    )


def _rule(
    own: AnswerRule | None,
    choice: ToolChoice,
    use: ToolUse,
    allowed: Sequence[FunctionTool],
    support: ToolSupport,
) -> AnswerRule | None:
    """Return the rule of an answer that has to call functions, or may call strict ones; otherwise
    the request's own rule.
    """
    if choice.mode == "required":
        if own is not None:
            reason = "tool_choice requires a call, which keeps no other rule; remove one of them"
            raise BadInput(f"{own.where}: {reason}", param=own.where)
        return _bounded(support.required(use.format, allowed, use.max_calls))
    if own is None:
        is_strict = any(tool.is_strict for tool in allowed)
        schema = None
        if not is_strict:
            return None
    elif own.constraint.kind != "json":
        reason = "a rule that is no JSON schema leaves no room for calls; remove it, or the tools"
        raise UnsupportedValue(f"{own.where}: {reason}", param=own.where)
    else:
        schema = _schema_of(own)
        if schema is None:
            return own  # whose check names the mistake
    return _bounded(support.optional(use.format, allowed, use.max_calls, schema))


def _schema_of(rule: AnswerRule) -> Mapping[str, object] | None:
    """Return the JSON schema of a rule; None for a text that is no JSON object."""
    try:
        schema: object = from_json(rule.constraint.text, allow_inf_nan=False)
    except ValueError:
        return None
    return cast("Mapping[str, object]", schema) if isinstance(schema, dict) else None


def _bounded(constraint: Constraint) -> AnswerRule:
    if len(constraint.text) > MAX_RULE_CHARS:
        reason = f"their schemas have more than {MAX_RULE_CHARS} characters; shorten them"
        raise BadInput(f"tools: {reason}", param="tools")
    return AnswerRule("tools", constraint)


def check_history(messages: Sequence[Message], form: str) -> None:
    """Check that the model can read the calls and results in `messages`. `form`: format in which
    the model writes calls. Raises: UnsupportedValue if `form` is "" and there is a call or a
    result.
    """
    for index, message in enumerate(messages if not form else ()):
        if message.role == "tool":
            raise unread_call(f"messages[{index}].role", is_result=True)
        if message.calls:
            raise unread_call(f"messages[{index}].tool_calls", is_result=False)


def unread_call(where: str, *, is_result: bool) -> UnsupportedValue:
    """Return the refusal of a call, or of the result of one, in the history of a model that calls
    no functions. `where`: field that has it.
    """
    reason = "cannot read a tool's result" if is_result else "cannot read calls of another model"
    return UnsupportedValue(f"{where}: {NO_TOOLS} and {reason}; {NEW_CHAT}", param=where)
