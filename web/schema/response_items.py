"""Messages of the Responses API, as they are listed, stored and sent; and the messages of a chat
that they become. Source: openai 3.57 types.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from fleet.processing import AudioPart, Message, TextPart


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class AudioData(msgspec.Struct, frozen=True, kw_only=True):
    data: str
    format: str | None = None


class InputSound(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    input_audio: AudioData


ItemPart = InputText | OutputText | InputSound


class MessageItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message: input of a response, or its answer. Texts of the assistant are `OutputText`, texts
    of other roles `InputText`.
    """

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role: Literal["user", "assistant", "system", "developer"]
    content: list[ItemPart]


def message_of(item: MessageItem, where: str) -> Message:
    """Return an item as a message of a chat. A message of one text is a plain string, as most
    templates expect. `where`: place of the item's content in the request.
    """
    parts = tuple(_part(part, f"{where}[{index}]") for index, part in enumerate(item.content))
    role = "system" if item.role == "developer" else item.role
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return Message(role=role, content=TextPart(text=parts[0].text, where=where))
    return Message(role=role, content=parts)


def _part(part: ItemPart, where: str) -> TextPart | AudioPart:
    if isinstance(part, InputSound):
        return AudioPart(data=part.input_audio.data, where=f"{where}.input_audio.data")
    return TextPart(text=part.text, where=f"{where}.text")


def num_chars(items: Sequence[MessageItem]) -> int:
    """Count the characters of the items' texts and audio."""
    parts = (part for item in items for part in item.content)
    return sum(
        len(part.input_audio.data if isinstance(part, InputSound) else part.text) for part in parts
    )
