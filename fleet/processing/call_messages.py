"""Function calls and their results among the messages of a chat, the same for every route whose
input is a list of items. Knows no route.
"""

from dataclasses import replace

from fleet.processing.base import Message, TextPart
from fleet.processing.tool_calls.tools import FunctionCall


def add_call(messages: list[Message], call: FunctionCall, where: str) -> None:
    """Add a call to the last message if that is the assistant's, otherwise as a message of its own.
    `where`: field of the user's input that has the call, named in errors.
    """
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant", content=TextPart(text="", where=where)))
    messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))


def add_result(messages: list[Message], call_id: str, result: TextPart) -> None:
    """Add the result of a call as a message. A result without a call in `messages` is left out."""
    calls = (call for message in messages for call in message.calls)
    called = next((call for call in calls if call.id == call_id), None)
    if called is not None:
        messages.append(Message(role="tool", content=result, name=called.name, call_id=call_id))
