"""Recognitions of the user's speech that are under way in one voice session, so that no response
has a clip recognised a second time. Knows no stage and no socket.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from fleet.processing import AudioPart, Message, TextPart
from web.realtime.conversation import Conversation
from web.realtime.prompt import Prompt


class Recognitions:
    """Clips being recognised, by name. The transcript of a clip whose recognition has ended is in
    the conversation, unless the recognition failed.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._under_way: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def recognizing(self, clip: str) -> AsyncIterator[None]:
        """Mark a clip as being recognised within this context."""
        self.begin([clip])
        try:
            yield
        finally:
            self.end([clip])

    def begin(self, clips: Sequence[str]) -> None:
        for clip in clips:
            self._under_way.setdefault(clip, asyncio.Event())

    def end(self, clips: Sequence[str]) -> None:
        for clip in clips:
            if (ended := self._under_way.pop(clip, None)) is not None:
                ended.set()

    async def until_ended(self, clips: Sequence[str]) -> None:
        """Wait for the recognitions of these clips that are under way, if prompts have their
        transcripts.
        """
        if not self._conversation.sends_transcripts:
            return
        while waiting := [self._under_way[clip] for clip in clips if clip in self._under_way]:
            await waiting[0].wait()

    def with_transcripts(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the known transcripts in the place of their clips."""
        if not self._conversation.sends_transcripts:
            return prompt
        messages = tuple(self._with_transcripts(message) for message in prompt.messages)
        return replace(prompt, messages=messages)

    def _with_transcripts(self, message: Message) -> Message:
        if not isinstance(message.content, tuple):
            return message
        return replace(message, content=tuple(self._known(part) for part in message.content))

    def _known(self, part: TextPart | AudioPart) -> TextPart | AudioPart:
        if not isinstance(part, AudioPart):
            return part
        text = self._conversation.transcript_of(part.name)
        return part if text is None else TextPart(text=text, where=part.where, is_transcript=True)
