"""What is kept of a request's body for people to read and send again: all of it but its sound. Knows no route."""

import json
from typing import cast

from web.schema import ChatBody

MAX_KEPT_BYTES = 16_384
"""A longer body is not kept: every worker of the request reads what is kept of it."""
MAX_SOUND_CHARS = 256
SOUND_FIELDS = ("data", "url")


def kept_body(body: ChatBody) -> str:
    """The body as JSON, each piece of sound replaced by a word on its size; "" where that is too long still."""
    text = json.dumps(_without_sound(body.model_dump(exclude_unset=True)), ensure_ascii=False)
    return text if len(text.encode()) <= MAX_KEPT_BYTES else ""


def _without_sound(value: object, field: str = "") -> object:
    if isinstance(value, str) and field in SOUND_FIELDS and len(value) > MAX_SOUND_CHARS:
        return f"(sound, {len(value)} characters, is not kept)"
    if isinstance(value, dict):
        return {name: _without_sound(inner, name) for name, inner in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_without_sound(inner) for inner in cast("list[object]", value)]
    return value
