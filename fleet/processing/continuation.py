"""Prompts that end within their last message, which the answer continues. Knows no tokenizer.

Source: transformers 5.23, utils/chat_template_utils.py (`continue_final_message`).
"""

import secrets
from collections.abc import Sequence
from typing import cast

from fleet.core.errors import BadInput
from fleet.processing.template import TemplateMessage

WHERE = "continue_final_message"


class Continuation:
    """Finds where a chat template writes the end of the last message: `marked` adds a random word,
    which no text of a user can contain, and a space to the message. If the template removes the
    space, the template strips blanks at the end of a text, and `cut` strips them too.
    """

    def __init__(self) -> None:
        self._mark = f"end{secrets.token_hex(16)}"
        self._text = ""

    def marked(self, messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """Return the messages with the random word after the text of the last one. Raises: BadInput
        if the last message does not end with text.
        """
        *others, last = messages
        content = last.get("content")
        blocks = cast("list[dict[str, str]]", content) if isinstance(content, list) else None
        end = blocks[-1].get("text") if blocks else content
        if not isinstance(end, str):
            raise BadInput(f"{WHERE}: the last message does not end with text", param=WHERE)
        self._text = end.strip()
        end += f"{self._mark} "
        return [
            *others,
            {
                **last,
                "content": [*blocks[:-1], {**blocks[-1], "text": end}] if blocks else end,
            },
        ]

    def cut(self, prompt: str) -> str:
        """Return a prompt, rendered from the `marked` messages, up to the end of the last message.
        Raises: BadInput if the template changes that message.
        """
        before, mark, after = prompt.rpartition(self._mark)
        if not mark or self._text not in before:
            raise BadInput(
                f"{WHERE}: the model's chat template changes the last message, so it cannot be "
                "continued",
                param=WHERE,
            )
        return before if after.startswith(" ") else before.rstrip()
