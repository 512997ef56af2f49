"""The tools of a response as clients read them back. Knows no route."""

from collections.abc import Mapping
from typing import Any, TypedDict

from fleet.processing.tool_calls.tools import FunctionTool
from web.schema.response_object import ToolView
from web.schema.tools import ToolChoice, ToolFields, read_choice, read_tools


class ShownTools(TypedDict, total=False):
    """Fields of a response about its tools."""

    tools: list[ToolView]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool


def shown_tools(body: ToolFields, call_format: str) -> ShownTools:
    """Return the fields of a response about the tools of its request. The response of a model that
    calls no functions (`call_format` is "") has none.
    """
    if not call_format:
        return {}
    tools = read_tools(body.tools, "tools")
    return {
        "tools": [_tool_view(tool) for tool in tools],
        "tool_choice": _choice_view(read_choice(body.tool_choice, "tool_choice", tools)),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }


def _tool_view(tool: FunctionTool) -> ToolView:
    return ToolView(
        name=tool.name,
        description=tool.description or None,
        parameters=tool.parameters,
        strict=tool.is_strict,
    )


def _choice_view(choice: ToolChoice) -> str | Mapping[str, Any]:
    functions = [{"type": "function", "name": name} for name in choice.names or ()]
    if choice.is_named:
        return functions[0]
    if choice.names is not None:
        return {"type": "allowed_tools", "mode": choice.mode, "tools": functions}
    return choice.mode
