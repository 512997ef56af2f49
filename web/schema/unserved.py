"""Refusal of values of served fields: roles, content parts and tool choices of OpenAI's API that
this server does not have.

Every refusal has the code of `UnsupportedValue`. Its message is for users of a chat page, who can
change the chat or a setting of the client, but no field of a request. Whole fields that are not
served are in `web/schema/fields`. Knows no stage.
"""

from typing import cast

from fleet.core.errors import SHOWN_CHARS, UnsupportedValue
from web.schema.fields.chat import NO_TOOLS
from web.schema.fields.common import FILES, IMAGES, VIDEO
from web.schema.fields.response import HOSTED, REFERENCES, THOUGHTS


class UnservedValue(ValueError):
    """Raised by a validator for a value that is valid in OpenAI's API but not served."""


FORMATS = ("text", "json_object", "json_schema")
"""Types of `response_format`."""
EMPTY: tuple[object, ...] = (None, "", {}, [])
"""Values that clients send for an unset field."""
_ROLES = {
    "function": "the former role of results; send them with the role tool",
}

_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file", "image_embeds"), IMAGES),
    **dict.fromkeys(("video", "video_url", "input_video", "video_frames"), VIDEO),
    **dict.fromkeys(("file", "file_url", "input_file", "document"), FILES),
}
"""Types of content parts that the model cannot read -> what to do instead."""
_RENAMED_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "refusal", "thinking", "reasoning"), "text"),
    **dict.fromkeys(("audio", "output_audio", "audio_embeds"), "input_audio"),
}
"""Types of content parts in other APIs -> the served type to use instead."""
_ITEM_PARTS = ("input_text", "output_text", "input_audio")
"""Types of the content parts of a response's items."""
_ITEMS = ("message", "function_call", "function_call_output")
"""Types of the items of a response's input."""
_TOOL_PARTS = ("tool_use", "tool_result", "tool_call", "function_call", "function_call_output")


def check_role(role: object) -> object:
    """Return a message's role unchanged. Raises: UnservedValue for a role of former APIs."""
    if isinstance(role, str) and role in _ROLES:
        raise UnservedValue(_ROLES[role])
    return role


def check_part(part: object) -> object:
    """Return a content part; an unknown type is cut in length, since errors show it.

    Raises: UnservedValue for a type that the model cannot read.
    """
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return part
    if len(kind) > SHOWN_CHARS:
        return {**cast("dict[str, object]", part), "type": kind[:SHOWN_CHARS]}
    if kind in _PARTS:
        reason = _PARTS[kind]
    elif kind in _RENAMED_PARTS:
        reason = f"a part of type {kind} is not served; send it as type {_RENAMED_PARTS[kind]}"
    elif kind in _TOOL_PARTS:
        reason = (
            f"a part of type {kind} is not served; calls are the field tool_calls, and results "
            "messages with the role tool"
        )
    else:
        return part
    raise UnservedValue(reason)


def check_item(item: object) -> object:
    """Return an item of a response's input. Raises: UnservedValue for one that is neither a message
    nor a function call or its output.
    """
    kind = cast("dict[str, object]", item).get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind in _ITEMS:
        return item
    if kind == "item_reference":
        raise UnservedValue(REFERENCES)
    raise UnservedValue(THOUGHTS if kind == "reasoning" else HOSTED)


def check_item_part(part: object) -> object:
    """Return a content part of an item; an unknown type is cut in length, since errors show it.

    Raises: UnservedValue for a type that the model cannot read.
    """
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    served = kind in _ITEM_PARTS
    if isinstance(kind, str) and _RENAMED_PARTS.get(kind, kind) == "text" and not served:
        reason = "send it as type input_text, or output_text in a message of the assistant"
        raise UnservedValue(f"a part of type {kind} is not served; {reason}")
    return part if served else check_part(part)


def check_output_part(part: object) -> object:
    """Return a content part of a call's output; an unknown type is cut in length, since errors show
    it. Raises: UnservedValue for a type that the model cannot read.
    """
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    return part if kind == "input_text" else check_item_part(part)


def check_decision_part(part: object) -> object:
    """Return a content part of a decision; an unknown type is cut in length, since errors show it.
    Raises: UnservedValue for a type that the model cannot read.
    """
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    return part if kind == "input_json" else check_item_part(part)


def check_format(kind: object) -> object:
    """Return the type of a response format. Raises: UnservedValue for one that is not served."""
    if isinstance(kind, str) and kind not in FORMATS:
        served = ", ".join(FORMATS)
        raise UnservedValue(f"{kind[:SHOWN_CHARS]} is not served; use one of {served}")
    return kind


def check_tool_choice(name: str, choice: object) -> None:
    """Check the value `choice` of the field `name` for a model that calls no functions. A choice
    that requires no call is accepted, and the tools are never called.

    Raises: UnsupportedValue if the choice requires a tool call.
    """
    if choice in EMPTY:
        return
    mode = _tool_mode(cast("dict[str, object]", choice)) if isinstance(choice, dict) else choice
    if mode not in (None, "auto", "none"):
        reason = (
            f"{NO_TOOLS}, so {str(mode)[:40]} is not served; use auto or none, or turn "
            "tools off in the client"
        )
        raise UnsupportedValue(f"{name}: {reason}", param=name)


def _tool_mode(choice: dict[str, object]) -> object:
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        return cast("dict[str, object]", allowed).get("mode") if isinstance(allowed, dict) else kind
    return kind if kind in ("auto", "none") else "a named function"
