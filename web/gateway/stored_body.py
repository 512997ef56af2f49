"""What is kept of a request's body for people to read and send again: all of it but its sound. Knows no route."""

import json
from typing import cast

from web.schema.chat import ChatBody

MAX_KEPT_BYTES = 16_384
"""A longer body is not kept: every worker of the request reads what is kept of it."""
MAX_SOUND_CHARS = 256
SOUND_FIELDS = ("data", "url")


def kept_body(body: ChatBody) -> str:
    """The body as JSON, each piece of sound replaced by a word on its size; "" where that is too long still."""
    try:
        text = json.dumps(_Copier().without_sound(body.model_dump(exclude_unset=True)), ensure_ascii=False)
    except _TooLong:
        return ""
    return text if len(text.encode()) <= MAX_KEPT_BYTES else ""


class _TooLong(Exception):
    """The text would be longer than `MAX_KEPT_BYTES`."""


def _least_chars(value: object) -> int:
    """Return a length that the JSON of a string, number or constant exceeds; of a list or object, of its brackets alone."""
    if isinstance(value, str):
        return len(value)
    return 1 + value.bit_length() // 4 if isinstance(value, int) else 1


class _Copier:
    def __init__(self) -> None:
        self._left = MAX_KEPT_BYTES

    def without_sound(self, value: object, field: str = "") -> object:
        """Raises: _TooLong before much is copied."""
        if isinstance(value, str) and field in SOUND_FIELDS and len(value) > MAX_SOUND_CHARS:
            return f"(sound, {len(value)} characters, is not kept)"
        self._left -= len(field) + _least_chars(value)
        if self._left < 0:
            raise _TooLong
        if isinstance(value, dict):
            return {name: self.without_sound(inner, name) for name, inner in cast("dict[str, object]", value).items()}
        if isinstance(value, list):
            return [self.without_sound(inner) for inner in cast("list[object]", value)]
        return value
