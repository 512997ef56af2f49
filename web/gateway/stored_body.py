"""Copy of a request body for the trace and for retries, without its audio. Knows no route."""

import json
from collections.abc import Sequence
from typing import cast

from fleet.processing import AudioPart, Message, Recording, TextPart
from web.schema.chat import AnswerOptions

MAX_STORED_BYTES = 16_384
"""Limit of a stored body. Larger bodies are not stored, since every worker of the request reads the
stored copy.
"""
MAX_AUDIO_CHARS = 256
AUDIO_FIELDS = ("data", "url")


def stored_body(options: AnswerOptions, messages: Sequence[Message] = ()) -> str:
    """Return the body as JSON, audio replaced by a note of its size; "" if the text is longer than
    `MAX_STORED_BYTES`.

    `messages` is the prompt of a chat that was built without a body, such as a voice response.
    """
    fields = options.model_dump(exclude_unset=True, by_alias=True)
    if messages:
        fields["messages"] = [
            {"role": message.role, "content": _content(message), **_calls(message)}
            for message in messages
        ]
    try:
        text = json.dumps(_Copier().without_audio(fields), ensure_ascii=False)
    except _TooLong:
        return ""
    return text if len(text.encode()) <= MAX_STORED_BYTES else ""


def _content(message: Message) -> object:
    if isinstance(message.content, TextPart):
        return message.content.text
    return [
        {"type": "text", "text": p.text} if isinstance(p, TextPart) else _audio_note(p)
        for p in message.content
    ]


def _calls(message: Message) -> dict[str, object]:
    """Return the fields of a message about function calls."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.calls
    ]
    fields: dict[str, object] = {"tool_call_id": message.call_id} if message.call_id else {}
    if calls:
        fields["tool_calls"] = calls
    return fields


def _audio_note(part: AudioPart) -> object:
    """Return a content part that stands for audio in the stored body: a note of its size in place
    of the data.
    """
    num_samples = len(part.data.samples) if isinstance(part.data, Recording) else len(part.data)
    return {
        "type": "input_audio",
        "input_audio": {"data": f"(sound, {num_samples} samples, is not kept)", "format": "wav"},
    }


class _TooLong(Exception):
    """Raised when the copy of a body exceeds `MAX_STORED_BYTES`."""


def _min_json_len(value: object) -> int:
    """Return a lower bound of the length of a value's JSON text. Elements of a list or object are
    not included.
    """
    if isinstance(value, str):
        return len(value)
    return 1 + value.bit_length() // 4 if isinstance(value, int) else 1


class _Copier:
    def __init__(self) -> None:
        self._left = MAX_STORED_BYTES

    def without_audio(self, value: object, field: str = "") -> object:
        """Copy a value of the body, with audio replaced by a note. `field` is the name under which
        the value stands.

        Raises: _TooLong once the copy exceeds `MAX_STORED_BYTES`.
        """
        if isinstance(value, str) and field in AUDIO_FIELDS and len(value) > MAX_AUDIO_CHARS:
            return f"(sound, {len(value)} characters, is not kept)"
        self._left -= len(field) + _min_json_len(value)
        if self._left < 0:
            raise _TooLong
        if isinstance(value, dict):
            return {
                name: self.without_audio(inner, name)
                for name, inner in cast("dict[str, object]", value).items()
            }
        if isinstance(value, list):
            return [self.without_audio(inner) for inner in cast("list[object]", value)]
        return value
