"""Items of the Responses API, as they are listed, stored and sent: messages, function calls and
their outputs; and the messages of a chat that they become. Source: openai 3.57 types.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from fleet.processing import AudioPart, Message, TextPart
from fleet.processing.call_messages import add_call, add_result
from fleet.processing.tool_calls.tools import FunctionCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]


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


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message: input of a response, or its answer. Texts of the assistant are `OutputText`, texts
    of other roles `InputText`.
    """

    id: str
    status: ItemStatus = "completed"
    role: Literal["user", "assistant", "system", "developer"]
    content: list[ItemPart]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function call. `arguments`: JSON text, as the model wrote it. A call whose answer was cut
    is `incomplete`, and is left out of later prompts.
    """

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"

    @property
    def is_cut(self) -> bool:
        return self.status != "completed"


class CallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """The output of a function call, as the client sent it."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """The output as one text, as the result of a call in a chat."""
        if isinstance(self.output, str):
            return self.output
        return "\n".join(part.text for part in self.output)


ResponseItem = MessageItem | CallItem | CallOutputItem


class PlacedItem(NamedTuple):
    """An item, and the field of the request that has its content."""

    item: ResponseItem
    where: str


def messages_of(items: Iterable[PlacedItem]) -> list[Message]:
    """Return items as messages of a chat. A call becomes a part of the assistant's message before
    it.
    """
    messages: list[Message] = []
    for item, where in items:
        if isinstance(item, MessageItem):
            messages.append(_message_of(item, where))
        elif isinstance(item, CallOutputItem):
            add_result(messages, item.call_id, TextPart(text=item.text, where=where))
        elif not item.is_cut:
            call = FunctionCall(id=item.call_id, name=item.name, arguments=item.arguments)
            add_call(messages, call, where)
    return messages


def _message_of(item: MessageItem, where: str) -> Message:
    """Return a message of a chat. A message of one text is a plain string, as most templates
    expect. `where`: place of the item's content in the request.
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


def num_parts(items: Sequence[ResponseItem]) -> int:
    """Count the content parts of the items; a call or its output counts as one."""
    return sum(len(item.content) if isinstance(item, MessageItem) else 1 for item in items)


def num_chars(items: Sequence[ResponseItem]) -> int:
    """Count the characters of the items' texts and base64 audio."""
    return sum(_num_chars(item) for item in items)


def _num_chars(item: ResponseItem) -> int:
    if isinstance(item, CallItem):
        return len(item.arguments)
    if isinstance(item, CallOutputItem):
        return len(item.text)
    return sum(
        len(part.input_audio.data if isinstance(part, InputSound) else part.text)
        for part in item.content
    )
