"""Prompt of a voice response: the conversation as messages with recordings, and its generation
options. Knows no socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet.core.ids import RequestId
from fleet.processing import AudioPart, Message, RecognitionOptions, TextPart
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import ActiveRequest
from web.gateway.sampling import new_seed
from web.openai.recognition import NO_OPTIONS
from web.realtime.session_tools import ToolSettings
from web.schema.chat import AudioOptions, ChatOptions

BEFORE_OTHERS_S = 0.0
"""Arrival time that puts a response before the other waiting requests of its client, since a person
waits for it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`hearing`: how the audio of the messages is recognised, by a graph that does so. `speed`:
    pace of the voice, other than 1 only if the voice can change it.
    """

    messages: tuple[Message, ...]
    options: ChatOptions
    hearing: RecognitionOptions = NO_OPTIONS
    speed: float = 1.0

    async def submit(self, gateway: Gateway, request_id: RequestId) -> ActiveRequest:
        """Submit the prompt as a chat request.

        Raises: BadInput, InputTooLarge, Overloaded, NoWorker, RedisUnreachable.
        """
        gateway.check_num_messages(len(self.messages))
        spoken = "audio" in self.options.wants
        chat = await gateway.prepare_chat(
            self.options,
            self.messages,
            request_id,
            kind="voice",
            where="conversation",
            arrived_s=BEFORE_OTHERS_S,
            outputs=gateway.outputs(spoken=spoken, heard=bool(self.clip_names)),
            hearing=self.hearing if self.clip_names else NO_OPTIONS,
        )
        return await gateway.submit_prepared(chat.at_speed(self.speed) if spoken else chat)

    @property
    def clip_names(self) -> list[str]:
        """The names of the prompt's audio clips, in order."""
        return [
            part.name
            for message in self.messages
            if isinstance(message.content, tuple)
            for part in message.content
            if isinstance(part, AudioPart)
        ]

    def renamed(self, name: str, new_name: str) -> "Prompt":
        """Return the prompt with `new_name` in place of `name` as the name of a clip."""

        def part_of(part: TextPart | AudioPart) -> TextPart | AudioPart:
            is_meant = isinstance(part, AudioPart) and part.name == name
            return replace(part, name=new_name) if is_meant else part

        def message_of(message: Message) -> Message:
            if not isinstance(message.content, tuple):
                return message
            return replace(message, content=tuple(part_of(part) for part in message.content))

        return replace(self, messages=tuple(message_of(message) for message in self.messages))

    def shortened(self) -> "Prompt | None":
        """Return the prompt without the oldest third of its turns, but with the instructions; None
        if fewer than two turns are left.
        """
        instructions = [message for message in self.messages if message.role == "system"][:1]
        turns = self.messages[len(instructions) :]
        if len(turns) < 2:
            return None
        left = turns[max(1, len(turns) // 3) :]
        while left and left[0].role == "tool":  # whose call is dropped
            left = left[1:]
        return replace(self, messages=(*instructions, *left)) if left else None


def make_prompt(
    model: str,
    messages: Sequence[Message],
    *,
    spoken: bool,
    voice: str,
    max_output_tokens: int | None,
    session: str | None,
    seed: int | None = None,
    hearing: RecognitionOptions = NO_OPTIONS,
    speed: float = 1.0,
    tools: ToolSettings = ToolSettings(),  # noqa: B008
    store: bool | None = None,
) -> Prompt:
    """Return the prompt of a response to `messages`. `session` names the conversation, so that each
    turn reuses the computed prefix of the previous turn; None for a response outside of the
    conversation.

    `store`: False if nothing of the answer may be kept. Without `seed` a random seed is chosen, so
    that the same prompt submitted again has the same response.
    """
    options = ChatOptions(
        model=model,
        modalities=["text", "audio"] if spoken else ["text"],
        audio=AudioOptions(voice=voice or None) if spoken else None,
        stream=True,
        seed=new_seed() if seed is None else seed,
        max_tokens=max_output_tokens,
        prompt_cache_key=session,
        tools=list(tools.tools) or None,
        tool_choice=tools.choice if tools.tools else None,
        parallel_tool_calls=tools.parallel if tools.tools else None,
        store=store,
    )
    return Prompt(messages=tuple(messages), options=options, hearing=hearing, speed=speed)
