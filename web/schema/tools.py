"""Function tools of a request: their definitions, and which of them the answer may or must call,
in the form of chats (`{"type": "function", "function": {"name": ...}}`) and in the form of Realtime
and Responses (`{"type": "function", "name": ...}`).

Source: openai 3.57 types. Knows no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from fleet.core.errors import SHOWN_CHARS, BadInput, UnsupportedValue, quoted
from fleet.processing.tool_calls.tools import FunctionTool
from web.schema.body import Body
from web.schema.fields.table import is_neutral
from web.schema.unserved import EMPTY

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
Mode = Literal["auto", "none", "required"]
MODES = ("auto", "none", "required")
_FORMS = 'use auto, none, required, {"type": "function", ...} or {"type": "allowed_tools", ...}'
_KNOWN = ("type", "function")
_NEUTRAL = (("allowed_callers", ["direct"]),)
"""Fields of a function with the value that means the same as their absence."""


class ToolFields(Body):
    """The fields of a request about tools, which are read for a model that calls functions."""

    tools: list[object] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None


class FunctionBody(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls an answer may have. `names`: functions that the answer may call, None for all.
    `is_named`: True if the request names the one function that must be called.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None
    is_named: bool = False

    def allows(self, tool: FunctionTool) -> bool:
        return self.names is None or tool.name in self.names


def read_tools(given: Sequence[object] | None, where: str) -> tuple[FunctionTool, ...]:
    """Return the functions of a request's list of tools, the field `where`.

    Raises: BadInput, UnsupportedValue naming the field.
    """
    given = given or ()
    if len(given) > MAX_TOOLS:
        raise BadInput(f"{where}: {len(given)} tools; at most {MAX_TOOLS} are read", param=where)
    tools = tuple(_tool(each, f"{where}[{index}]") for index, each in enumerate(given))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            at = f"{where}[{index}]"
            raise BadInput(f"{at}: there is a function {name!r} already", param=at)
    return tools


def _tool(given: object, where: str) -> FunctionTool:
    fields = _object(given, where)
    check_is_function(fields.get("type", "function"), f"{where}.type")
    is_nested = "function" in fields
    inner = fields["function"] if is_nested else {k: v for k, v in fields.items() if k != "type"}
    others = [name for name, value in fields.items() if name not in _KNOWN and value is not None]
    if is_nested and others:
        raise _unknown(where, others[0])
    at = f"{where}.function" if is_nested else where
    try:
        body = FunctionBody.model_validate(inner)
    except ValidationError as error:
        raise _invalid(error, at) from error
    for name, value in (body.model_extra or {}).items():
        if not (is_neutral(value) or (name, value) in _NEUTRAL):
            raise _unknown(at, name)
    if (body.parameters or {}).get("type", "object") != "object":
        kind = f"{at}.parameters.type"
        raise BadInput(f"{kind}: the arguments of a function are an object", param=kind)
    return FunctionTool(
        name=body.name,
        description=body.description or "",
        parameters=body.parameters or None,
        is_strict=bool(body.strict),
    )


def check_is_function(kind: object, where: str) -> None:
    """Check the type of a tool or a call. Raises: UnsupportedValue for one that is no function."""
    if kind != "function":
        reason = f"{quoted(str(kind))} is not served; only functions are"
        raise UnsupportedValue(f"{where}: {reason}", param=where)


def read_choice(given: object, where: str, tools: Sequence[FunctionTool]) -> ToolChoice:
    """Return the choice in the field `where` among `tools`. Raises: BadInput, UnsupportedValue."""
    if given in EMPTY:
        return ToolChoice()
    choice = _choice(given, where)
    known = {tool.name for tool in tools}
    unknown = [name for name in choice.names or () if name not in known]
    if unknown:
        raise BadInput(f"{where}: no function {quoted(unknown[0])} among tools", param=where)
    if choice.mode == "required" and not tools:
        raise BadInput(f"{where}: a call is required, and there are no tools", param=where)
    return choice


def _choice(given: object, where: str) -> ToolChoice:
    fields = cast("Mapping[str, object]", given) if isinstance(given, dict) else {"type": given}
    kind = fields.get("type")
    if kind in MODES:
        return ToolChoice(mode=kind)
    if kind == "function":
        return ToolChoice(mode="required", names=(_name(fields, where),), is_named=True)
    if kind != "allowed_tools":
        shown = quoted(str(kind)[:SHOWN_CHARS])
        raise UnsupportedValue(f"{where}: {shown} is not served; {_FORMS}", param=where)
    allowed = _object(fields.get("allowed_tools", fields), f"{where}.allowed_tools")
    mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        reason = "needs mode, which is auto or required, and a list of tools"
        raise BadInput(f"{where}: allowed_tools {reason}", param=where)
    if mode == "required" and not listed:
        raise BadInput(f"{where}: a call is required, and no tool is allowed", param=where)
    names = (_name(_object(each, where), where) for each in cast("list[object]", listed))
    return ToolChoice(mode=mode, names=tuple(names))


def _name(fields: Mapping[str, object], where: str) -> str:
    check_is_function(fields.get("type", "function"), where)
    inner = fields.get("function", fields)
    name = cast("Mapping[str, object]", inner).get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise BadInput(f"{where}: name the function: {_FORMS}", param=where)
    return name


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: this field must be an object", param=where)
    return cast("Mapping[str, object]", value)


def _unknown(where: str, name: str) -> UnsupportedValue:
    path = f"{where}.{name[:SHOWN_CHARS]}"
    return UnsupportedValue(f"{path}: functions have no such field; remove it", param=path)


def _invalid(error: ValidationError, where: str) -> BadInput:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join([where, *(str(piece)[:SHOWN_CHARS] for piece in first["loc"])])
    message = "this field is required" if first["type"] == "missing" else first["msg"]
    return BadInput(f"{path}: {message}", param=path)
