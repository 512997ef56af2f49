"""The frontend of any causal language model: text in, text out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from fleet.config.schema import Limits
from fleet.core.errors import UnsupportedValue
from fleet.core.request import RequestSpec
from fleet.processing.base import AudioPart, ChatRequest, Message, TextPart
from fleet.processing.context_length import limit_answer_length, read_num_positions
from fleet.processing.prompt import PromptFrontend
from fleet.processing.sampling_defaults import read_checkpoint_sampling

MAIN = "lm"
"""Name of the graph's only stage."""


class TextFrontend(PromptFrontend):
    """Prompt processing of one text model's checkpoint. Raises: ConfigError if the checkpoint has
    no tokenizer.json or no chat template.
    """

    sample_rate_hz = 0
    audio_rate_hz = 0

    def __init__(self, checkpoint: Path, limits: Limits) -> None:
        self.positions = read_num_positions(checkpoint)
        if self.positions is not None:
            longest = min(limits.max_prompt_tokens, self.positions - 1)
            limits = limits.model_copy(update={"max_prompt_tokens": longest})
        super().__init__(checkpoint, limits)
        self._sampling = read_checkpoint_sampling(checkpoint)

    def prepare(self, chat: ChatRequest) -> tuple[RequestSpec, bytes | None]:
        if chat.spoken:
            raise UnsupportedValue(
                "modalities: this model does not speak; ask for text", param="modalities"
            )
        flat = tuple(
            dataclasses.replace(message, content=_joined(message)) for message in chat.messages
        )
        ids = self.tokenize(dataclasses.replace(chat, messages=flat))
        self.check_length(ids, chat.where)
        spec = RequestSpec(
            id=chat.id,
            graph=chat.graph,
            prompt_ids=tuple(ids),
            outputs=chat.outputs,
            sampling={
                stage: limit_answer_length(one, len(ids), self.positions)
                for stage, one in chat.sampling.items()
            },
            given=self.given_ids(chat.given),
            created_us=chat.created_us,
        )
        return spec, None

    def speech_prompt(self, text: str) -> str:
        return text

    def transcription_prompt(self, language: str | None = None, where: str = "language") -> str:
        """Return "", since the model accepts no audio."""
        return ""

    def voices(self) -> list[str]:
        return []

    def voice(self, wanted: str | None, where: str = "audio.voice") -> str:
        return wanted or ""

    def sampling(self) -> Mapping[str, Mapping[str, float | int]]:
        return {MAIN: self._sampling}

    def num_prompt_audio_tokens(self, spec: RequestSpec) -> int:
        return 0

    def num_answer_audio_tokens(self, num_samples: int) -> int:
        return 0


def _joined(message: Message) -> TextPart:
    """Return the text parts of a message joined to one string, which templates of text models
    expect.
    """
    if isinstance(message.content, TextPart):
        return message.content
    texts: list[str] = []
    for part in message.content:
        if isinstance(part, AudioPart):
            raise UnsupportedValue(
                f"{part.where}: this model takes text only; remove the audio from the chat",
                param=part.where,
            )
        texts.append(part.text)
    where = message.content[0].where if message.content else "messages"
    return TextPart(text="\n".join(texts), where=where)
