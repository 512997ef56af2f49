"""Detection and refusal of features of OpenAI's API and its relatives that this server does not have.

Every refusal has the code of `UnsupportedValue`. Its message is for users of a chat page, who can change the chat or a setting of
the client, but no field of a request. Knows no stage.
"""

import re
from collections.abc import Iterator
from typing import cast

from pydantic import BaseModel

from fleet.core.errors import SHOWN_CHARS, BadInput, UnsupportedValue


class UnservedValue(ValueError):
    """A validator found a value that is valid in OpenAI's API but not served."""


EMPTY: tuple[object, ...] = (None, "", {}, [])
"""Values that clients send for an unset field."""
_NO_TOOLS = "this model calls no tools"
_ROLES = {
    "tool": f"{_NO_TOOLS} and cannot read a tool's result",
    "function": f"{_NO_TOOLS} and cannot read a function's result",
}
_NEW_CHAT = "start a new chat with this model, or send the result as text in a user message"

_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file", "image_embeds"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video", "video_frames"), "video"),
    **dict.fromkeys(("file", "file_url", "input_file", "document"), "file"),
}
"""Medium of each type of content parts."""
_RENAMED_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "refusal", "thinking", "reasoning"), "text"),
    **dict.fromkeys(("audio", "output_audio", "audio_embeds"), "input_audio"),
}
"""Types of content parts of other APIs, and the served type to use instead."""
_TOOL_PARTS = ("tool_use", "tool_result", "tool_call", "function_call", "function_call_output")

_MEDIA = {
    **dict.fromkeys(("audio", "wav"), "audio"),
    **dict.fromkeys(("image", "img", "picture", "photo"), "image"),
    "video": "video",
    **dict.fromkeys(("file", "document", "attachment", "media", "application"), "file"),
}
"""Words for media, singular, and their kind."""
_MEDIA_FIELD = re.compile(
    r"(?:multi_?modal_|mm_|(?:input|user|source|init|chat)_)?"
    rf"(?P<media>{'|'.join(_MEDIA)})s?"
    r"(?:_?(?:ur[li]|path|data|content|file|base64|b64|bytes|embed|embedding|frame|part|input)s?|_ids)?"
)
"""Names of fields with media. A medium with other words is a setting: image_quality, video_fps."""
_REFERENCE_FIELD = re.compile(
    r"(?:ref|reference|clone|cloned|cond|prompt|speaker|known_speaker)_"
    r"(?:audio|text|wav|speech|file|sample|embed|embedding|reference)s?|(?:ref|reference|clone|cloned)_voices?"
    r"|(?:audio|voice)_(?:prompt|sample|clone|reference)s?|references|inputs?_embed(?:ding)?s?"
)
"""Names of fields with a voice to clone, or with embeddings in place of text."""
_TEXT_FIELDS = frozenset(
    {"context", "contents", "history", "input", "input_ids", "inputs", "instructions", "prompt", "prompt_ids", "prompt_text"}
    | {"prompt_token_ids", "prompts", "ssml", "system", "system_prompt", "text"}
)
"""Fields of other APIs with text."""
_FREE_FIELDS = frozenset(
    {"background_tasks", "features", "metadata", "model_item", "variables"}
    | {"guided_json", "json_schema", "properties", "response_schema", "schema", "structured_outputs"}
)
"""Fields with data and schemas whose names the client chooses; pictures in them (of users, of models) are not input."""
_DATA_URL = re.compile(r"data:(?:(?P<media>audio|image|video|application)/|;base64,)", re.IGNORECASE)
_MAX_DEPTH = 8
_MAX_NAME_CHARS = 64
"""Limit of names of fields with content."""
_MAX_TRIVIAL_CHARS = 32
"""Limit of numbers and booleans that are sent as text."""
MAX_UNKNOWN_FIELDS = 256
_INSTEAD = {
    "audio": "a chat takes audio as content parts of type input_audio; voices cannot be cloned",
    "image": "this model cannot read images; remove them from the chat, or choose a model that can",
    "video": "this model cannot read video; remove it from the chat, or choose a model that can",
    "file": "this model cannot read files; remove them from the chat, or paste their text into a message",
    "reference": "voices cannot be cloned; remove it, and choose one of the voices that GET /v1/audio/voices lists",
    "text": "send it as the content of a message, or as the input of a speech",
}


def check_role(role: object) -> object:
    """Raises: UnservedValue for message roles of tools."""
    if isinstance(role, str) and role in _ROLES:
        raise UnservedValue(f"{_ROLES[role]}; {_NEW_CHAT}")
    return role


def check_part(part: object) -> object:
    """Truncate an unknown type, since errors show it. Raises: UnservedValue for content parts of other models."""
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return part
    if len(kind) > SHOWN_CHARS:
        return {**cast("dict[str, object]", part), "type": kind[:SHOWN_CHARS]}
    if kind in _PARTS:
        reason = _INSTEAD[_PARTS[kind]]
    elif kind in _RENAMED_PARTS:
        reason = f"a part of type {kind} is not served; send it as type {_RENAMED_PARTS[kind]}"
    elif kind in _TOOL_PARTS:
        reason = f"{_NO_TOOLS} and cannot read {kind} parts; {_NEW_CHAT}"
    else:
        return part
    raise UnservedValue(reason)


def check_tool_choice(name: str, choice: object) -> None:
    """Raises: UnsupportedValue if a tool is required. Optional tools are accepted and never called."""
    if choice in EMPTY:
        return
    mode = _tool_mode(cast("dict[str, object]", choice)) if isinstance(choice, dict) else choice
    if mode not in (None, "auto", "none"):
        reason = f"{_NO_TOOLS}, so {str(mode)[:40]} is not served; use auto or none, or turn tools off in the client"
        raise UnsupportedValue(f"{name}: {reason}", param=name)


def _tool_mode(choice: dict[str, object]) -> object:
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        return cast("dict[str, object]", allowed).get("mode") if isinstance(allowed, dict) else kind
    return kind if kind in ("auto", "none") else "a named function"


def tool_calls_refusal(where: str) -> UnsupportedValue:
    """Return the refusal of a message with tool calls."""
    return UnsupportedValue(f"{where}: {_NO_TOOLS} and cannot read calls of another model; {_NEW_CHAT}", param=where)


def refuse_content(body: BaseModel, where: str = "", *, instead: str | None = None) -> None:
    """Refuse unknown fields with content, at any depth: without them the answer would be to another question.

    `instead`: advice in place of that for the kind of content.
    Raises: UnsupportedValue naming the field; BadInput for too many unknown fields.
    """
    unknown = body.model_extra or {}
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        param = where.removesuffix(".") or None
        reason = f"{len(unknown)} unknown fields; at most {MAX_UNKNOWN_FIELDS} are ignored, so remove some"
        raise BadInput(f"{param or 'the body'}: {reason}", param=param)
    for name, value in unknown.items():
        for field, kind in _contents(f"{where}{name[:64]}", name, value):
            reason = f"this field carries content that would be lost; {instead or _INSTEAD[kind]}"
            raise UnsupportedValue(f"{field}: {reason}", param=field)
    for name in type(body).model_fields:
        for at, inner in _bodies(f"{where}{name}", getattr(body, name)):
            refuse_content(inner, f"{at}.", instead=instead)


def _bodies(where: str, value: object) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield where, value
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[object]", value)):
            if isinstance(inner, BaseModel):
                yield f"{where}[{index}]", inner


def _contents(where: str, name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the place and the kind of each content in an unknown field."""
    if _snake_case(name) in _TEXT_FIELDS and isinstance(value, str | list) and not _is_trivial(value):
        yield where, "text"
    yield from _media(where, name, value, _MAX_DEPTH)


def _media(where: str, name: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    words = _snake_case(name)
    if depth == 0 or words in _FREE_FIELDS:
        return
    kind = _kind_by_name(words) or _kind_by_value(value)
    if kind is not None:
        # checked only here, so once for each value
        if not _is_trivial(value):
            yield where, kind
    elif isinstance(value, dict):
        for inner_name, inner in cast("dict[str, object]", value).items():
            yield from _media(f"{where}.{inner_name[:64]}", inner_name, inner, depth - 1)
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[object]", value)):
            if isinstance(inner, str | dict | list):
                yield from _media(f"{where}[{index}]", "", inner, depth - 1)


def _kind_by_name(words: str) -> str | None:
    if not words:
        return None
    if _REFERENCE_FIELD.fullmatch(words):
        return "reference"
    medium = _MEDIA_FIELD.fullmatch(words)
    return _MEDIA[medium["media"]] if medium else None


def _kind_by_value(value: object) -> str | None:
    """Return the kind of a data URL, or of an object with the bytes of a file."""
    if isinstance(value, str) and (url := _DATA_URL.match(value)):
        return _MEDIA[(url["media"] or "file").lower()]
    if isinstance(value, dict):
        named = cast("dict[str, object]", value)
        has_type = named.get("type") == "base64" or any(name in named for name in ("media_type", "mime_type", "mimeType"))
        return "file" if has_type and "data" in named else None
    return None


def _snake_case(name: str) -> str:
    """Return the name in snake case; "" for one that is longer than `_MAX_NAME_CHARS`."""
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        return ""
    return "_".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)).lower()


def _is_trivial(value: object) -> bool:
    """Return True for values without content: empty ones, booleans, and numbers, which are texts in a form.

    A list of numbers may be token ids or an embedding.
    """
    if isinstance(value, dict):
        return all(_is_trivial(inner) for inner in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return all(_is_trivial(inner) and not _is_number(inner) for inner in cast("list[object]", value))
    if isinstance(value, str):
        if len(value) > _MAX_TRIVIAL_CHARS:
            return False
        return value.lower() in ("", "true", "false") or bool(re.fullmatch(r"-?\d{1,12}(\.\d{1,12})?", value))
    return value is None or isinstance(value, bool) or _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
