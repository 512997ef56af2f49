"""Copy of a request body for the trace and for retries, without its audio. Knows no route."""

import json
from typing import cast

from web.schema.chat import ChatBody

MAX_STORED_BYTES = 16_384
"""A larger body is not stored: every worker of the request reads the stored copy."""
MAX_AUDIO_CHARS = 256
AUDIO_FIELDS = ("data", "url")


def stored_body(body: ChatBody) -> str:
    """The body as JSON, audio replaced by a note of its size; "" if that is longer than `MAX_STORED_BYTES`."""
    try:
        text = json.dumps(_Copier().without_audio(body.model_dump(exclude_unset=True)), ensure_ascii=False)
    except _TooLong:
        return ""
    return text if len(text.encode()) <= MAX_STORED_BYTES else ""


class _TooLong(Exception):
    """The text would be longer than `MAX_STORED_BYTES`."""


def _min_json_len(value: object) -> int:
    """Return a lower bound of the JSON length of a string, number or constant; for a list or object, of its brackets."""
    if isinstance(value, str):
        return len(value)
    return 1 + value.bit_length() // 4 if isinstance(value, int) else 1


class _Copier:
    def __init__(self) -> None:
        self._left = MAX_STORED_BYTES

    def without_audio(self, value: object, field: str = "") -> object:
        """Copy a value of the body. Raises: _TooLong before much is copied."""
        if isinstance(value, str) and field in AUDIO_FIELDS and len(value) > MAX_AUDIO_CHARS:
            return f"(sound, {len(value)} characters, is not kept)"
        self._left -= len(field) + _min_json_len(value)
        if self._left < 0:
            raise _TooLong
        if isinstance(value, dict):
            return {name: self.without_audio(inner, name) for name, inner in cast("dict[str, object]", value).items()}
        if isinstance(value, list):
            return [self.without_audio(inner) for inner in cast("list[object]", value)]
        return value
