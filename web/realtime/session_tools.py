"""Function tools in the settings of a session and of a response. Knows no socket."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from fleet.core.errors import BadInput
from fleet.processing.tool_calls.tools import FunctionTool
from web.gateway.ignored_fields import warning_of
from web.realtime.protocol.client_events import ResponsePatch
from web.realtime.protocol.settings import SessionPatch, Settings
from web.schema.tools import read_choice, read_tools
from web.schema.unserved import EMPTY, check_tool_choice

Choice = str | dict[str, Any]


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of a response, in the form of the wire, and which of them it may or must call.
    `parallel`: False for at most one call, None if unset.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: Choice = "auto"
    parallel: bool | None = None


def drop_unserved_tools(
    call_format: str, before: Settings, settings: Settings, patch: SessionPatch
) -> tuple[Settings, list[BadInput]]:
    """Check the tools in `settings`, the result of applying `patch` to `before`. Returns the
    settings with each unserved field as it was in `before`, and a refusal for each. With
    `call_format` "", for a model that calls no functions, the tools are dropped and the settings
    warn of it.
    """
    if not call_format:
        return _without_tools(before, settings, patch)
    refused: list[BadInput] = []
    try:
        tools = read_tools(settings.tools, "session.tools")
    except BadInput as error:
        refused.append(error)
        tools = read_tools(before.tools, "session.tools")
    choice: Choice = settings.tool_choice
    try:
        read_choice(choice, "session.tool_choice", tools)
    except BadInput as error:
        is_given = "tool_choice" in patch.model_fields_set
        refused += [error] if is_given else []
        choice = before.tool_choice if is_given and before.tools == settings.tools else "auto"
    shown = tuple(map(_shown, tools))
    return msgspec.structs.replace(settings, tools=shown, tool_choice=choice), refused


def _without_tools(
    before: Settings, settings: Settings, patch: SessionPatch
) -> tuple[Settings, list[BadInput]]:
    refused: list[BadInput] = []
    choice = settings.tool_choice
    try:
        check_tool_choice("session.tool_choice", choice)
    except BadInput as error:
        refused.append(error)
        choice = before.tool_choice
    if isinstance(choice, dict):
        choice = "none" if choice.get("type") == "none" else "auto"
    warnings = before.warnings
    if "tools" in patch.model_fields_set:
        warnings = (warning_of("session.tools"),) if patch.tools else msgspec.UNSET
    changed = {"tools": (), "tool_choice": choice, "warnings": warnings}
    return msgspec.structs.replace(settings, parallel_tool_calls=msgspec.UNSET, **changed), refused


def _shown(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool as the session shows it."""
    described = {"description": tool.description} if tool.description else {}
    strict = {"strict": True} if tool.is_strict else {}
    return {
        "type": "function",
        "name": tool.name,
        **described,
        "parameters": cast("Mapping[str, Any]", tool.definition["function"])["parameters"],
        **strict,
    }


def tools_of(call_format: str, settings: Settings, patch: ResponsePatch | None) -> ToolSettings:
    """Return the tools of a response: from its request `patch`, or from the session's settings if
    the request has none. Raises: BadInput naming the field.
    """
    own = settings.parallel_tool_calls
    chosen = ToolSettings(
        tools=settings.tools,
        choice=settings.tool_choice,
        parallel=None if own is msgspec.UNSET else own,
    )
    if patch is None:
        return chosen
    has_choice = patch.tool_choice not in EMPTY
    if not call_format:
        check_tool_choice("response.tool_choice", patch.tool_choice)
        return ToolSettings()
    tools = read_tools(patch.tools if patch.tools is not None else chosen.tools, "response.tools")
    choice = patch.tool_choice if has_choice else chosen.choice
    if has_choice or patch.tools is None:
        read_choice(choice, "response.tool_choice", tools)
    else:
        choice = "auto"
    parallel = patch.parallel_tool_calls
    return ToolSettings(
        tools=tuple(map(_shown, tools)),
        choice=cast(Choice, choice),
        parallel=chosen.parallel if parallel is None else parallel,
    )
