"""The messages of a chat's body, as the frontends read them."""

from collections.abc import Awaitable, Callable, Mapping

from fleet.core.errors import BadInput
from fleet.processing import AudioPart, Message, TextPart
from fleet.processing.tool_calls.tools import FunctionCall
from web.http.offload import read_input
from web.schema.chat import AudioUrlPartBody, ChatBody, MessageBody, PartBody, TextPartBody

MAX_INLINE_PARTS = 256
"""Number of messages and content parts up to which a body is converted in the event loop."""


def is_large(body: ChatBody) -> bool:
    """Return True if the body has too many messages and parts to be converted in the event loop."""
    contents = (message.content for message in body.messages)
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    return len(body.messages) + num_parts > MAX_INLINE_PARTS


async def messages_of(
    body: ChatBody, transcript: Callable[[str], Awaitable[str | None]]
) -> tuple[Message, ...]:
    """Return the messages of a body. `transcript`: function that returns the text of an earlier
    spoken answer, by the id of its audio; None if the id is unknown or has expired.
    """
    spoken: dict[int, str] = {}
    for index, message in enumerate(body.messages):
        if message.audio is not None and message.content is None:
            text = await transcript(message.audio.id)
            if text is None:
                where = f"messages[{index}].audio.id"
                raise BadInput(
                    f"{where}: no such answer, or it has expired; send its transcript as content "
                    "instead",
                    param=where,
                )
            spoken[index] = text
    return await read_input(is_large(body), _messages, body, spoken)


def _messages(body: ChatBody, spoken: Mapping[int, str]) -> tuple[Message, ...]:
    """Convert the messages of a body. `spoken`: text of an earlier spoken answer, by the index of
    the message that refers to the answer.
    """
    return tuple(
        _message(message, spoken.get(index), f"messages[{index}]")
        for index, message in enumerate(body.messages)
    )


def _message(message: MessageBody, spoken: str | None, where: str) -> Message:
    content = message.content if message.content is not None else spoken
    if content is None and message.tool_calls:
        content = ""
    if content is None:
        raise BadInput(f"{where}.content: this field is required", param=f"{where}.content")
    _check_calls(message, where)
    if message.role == "tool":
        return _result(message, content, where)
    return Message(
        role="system" if message.role == "developer" else message.role,
        name=message.name or "",
        content=TextPart(text=content, where=f"{where}.content")
        if isinstance(content, str)
        else tuple(
            _part(part, f"{where}.content[{number}]") for number, part in enumerate(content)
        ),
        calls=tuple(
            FunctionCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
    )


def _check_calls(message: MessageBody, where: str) -> None:
    """Check that only an assistant's message has calls, and that exactly the messages with the role
    tool have a call id. Raises: BadInput naming the field.
    """
    if message.tool_calls and message.role != "assistant":
        at = f"{where}.tool_calls"
        raise BadInput(f"{at}: only an assistant's message calls functions", param=at)
    if (message.tool_call_id is None) == (message.role == "tool"):
        reason = "required in a message with the role tool, and in no other"
        raise BadInput(f"{where}.tool_call_id: {reason}", param=f"{where}.tool_call_id")


def _result(message: MessageBody, content: str | list[PartBody], where: str) -> Message:
    """Return the message with the result of a call, in which several text parts are joined by line
    ends. Raises: BadInput for a part that is not text.
    """
    texts: list[str] = []
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, TextPartBody):
            at = f"{where}.content[{number}].type"
            raise BadInput(f"{at}: the result of a call is text", param=at)
        texts.append(part.text)
    text = content if isinstance(content, str) else "\n".join(texts)
    return Message(
        role="tool",
        name=message.name or "",
        content=TextPart(text=text, where=f"{where}.content"),
        call_id=message.tool_call_id or "",
    )


def _part(part: PartBody, where: str) -> TextPart | AudioPart:
    if isinstance(part, TextPartBody):
        return TextPart(text=part.text, where=f"{where}.text")
    if isinstance(part, AudioUrlPartBody):
        return AudioPart(data=part.audio_url.url, where=f"{where}.audio_url.url")
    return AudioPart(data=part.input_audio.data, where=f"{where}.input_audio.data")
