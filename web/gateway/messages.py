"""The messages of a chat's body, as the frontends read them."""

from collections.abc import Awaitable, Callable, Mapping

from fleet.core.errors import BadInput
from fleet.processing import AudioPart, Message, TextPart
from web.http.offload import read_input
from web.schema.chat import AudioUrlPartBody, ChatBody, MessageBody, PartBody, TextPartBody

MAX_INLINE_PARTS = 256
"""Number of messages and content parts up to which a body is converted in the event loop."""


def is_large(body: ChatBody) -> bool:
    """Return True if to go through all messages and parts would stall the event loop."""
    contents = (message.content for message in body.messages)
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    return len(body.messages) + num_parts > MAX_INLINE_PARTS


async def messages_of(
    body: ChatBody, transcript: Callable[[str], Awaitable[str | None]]
) -> tuple[Message, ...]:
    """Return the messages of a body. `transcript`: returns what an earlier spoken answer said, by
    its id; None if it is unknown.

    Raises: BadInput naming a message without content; Overloaded as in `read_in_thread`.
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
    """Convert the messages of a body. `spoken`: transcript by the index of its message."""
    return tuple(
        _message(message, spoken.get(index), f"messages[{index}]")
        for index, message in enumerate(body.messages)
    )


def _message(message: MessageBody, spoken: str | None, where: str) -> Message:
    content = message.content if message.content is not None else spoken
    if content is None:
        raise BadInput(f"{where}.content: this field is required", param=f"{where}.content")
    return Message(
        role="system" if message.role == "developer" else message.role,
        name=message.name or "",
        content=TextPart(text=content, where=f"{where}.content")
        if isinstance(content, str)
        else tuple(
            _part(part, f"{where}.content[{number}]") for number, part in enumerate(content)
        ),
    )


def _part(part: PartBody, where: str) -> TextPart | AudioPart:
    if isinstance(part, TextPartBody):
        return TextPart(text=part.text, where=f"{where}.text")
    if isinstance(part, AudioUrlPartBody):
        return AudioPart(data=part.audio_url.url, where=f"{where}.audio_url.url")
    return AudioPart(data=part.input_audio.data, where=f"{where}.input_audio.data")
