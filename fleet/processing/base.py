"""The contract between the gateway and a model's prompt processing. Knows no HTTP and no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fleet.config.schema import Limits
from fleet.core.errors import ConfigError
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Mono audio as a microphone delivers it: PCM16 samples at their own rate."""

    samples: NDArray[np.int16]
    rate_hz: int


AudioSource = str | bytes | Recording
"""Audio before it is decoded: a file, as base64 or bytes, or a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """`where` names the field of the user's input, for error messages."""

    text: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPart:
    """Audio of a message: its source, or its samples once decoded, mono at the frontend's
    `audio_rate_hz`.

    `where` names the field of the user's input, for error messages.
    """

    data: AudioSource | Samples
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Turn of a conversation. A plain string stays a string, since chat templates may render
    strings and parts differently.

    `name`: the speaker, among several of one role; "" for none. Most chat templates do not write
    it.
    """

    role: str
    content: TextPart | tuple[TextPart | AudioPart, ...]
    name: str = ""


GivenAnswer = TextPart | tuple[int, ...]
"""An answer that is supplied, not sampled: the whole text, or its first tokens, which are all if
the last is an end token.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked chat, its sampling resolved for every stage it runs. `voice` matters where
    `spoken`.

    `where` and `voice_where` name the fields of the user's input that the prompt as a whole and the
    voice come from.
    """

    id: RequestId
    graph: str
    messages: tuple[Message, ...]
    outputs: tuple[EdgeName, ...]
    sampling: dict[StageName, Sampling] = field(default_factory=dict[StageName, Sampling])
    spoken: bool = False
    voice: str | None = None
    given: GivenAnswer = ()
    created_us: int = 0
    where: str = "messages"
    voice_where: str = "audio.voice"

    @property
    def audio_parts(self) -> list[AudioPart]:
        """All audio of the chat, in order."""
        contents = [
            message.content for message in self.messages if isinstance(message.content, tuple)
        ]
        return [part for content in contents for part in content if isinstance(part, AudioPart)]

    def with_samples(self, clips: Sequence[Samples]) -> "ChatRequest":
        """Return the chat with the samples of each audio part in place of its file."""
        left = iter(clips)

        def decoded(part: TextPart | AudioPart) -> TextPart | AudioPart:
            return replace(part, data=next(left)) if isinstance(part, AudioPart) else part

        turns = (
            replace(each, content=tuple(map(decoded, each.content)))
            if isinstance(each.content, tuple)
            else each
            for each in self.messages
        )
        return replace(self, messages=tuple(turns))


class Detokenizer(Protocol):
    """Converts the token ids of one answer, in order, to text without partial characters."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that later ids cannot change."""
        ...

    def finish(self) -> str:
        """Return the text that was held back; incomplete bytes become U+FFFD."""
        ...


class Frontend(Protocol):
    """Prompt processing of a model. Thread-safe: `prepare` runs in worker threads.

    Units: `sample_rate_hz` of the answer's audio; 0 if the model does not speak. `audio_rate_hz` of
    the audio in prompts; 0 if the model accepts none.
    """

    @property
    def sample_rate_hz(self) -> int: ...
    @property
    def audio_rate_hz(self) -> int: ...

    def prepare(self, chat: ChatRequest) -> tuple[RequestSpec, bytes | None]:
        """Return the request and its audio blob (float32 mono, clips concatenated). Decodes audio
        that is not decoded yet.

        Raises: BadInput, InputTooLarge naming the field.
        """
        ...

    def check_text(self, text: TextPart) -> None:
        """Check that the text can be part of a prompt. Raises: BadInput if it contains a control
        token.
        """
        ...

    def speech_prompt(self, text: str) -> str:
        """Return a question whose expected answer is this text: the speech of a supplied answer
        depends on the question.
        """
        ...

    def speech_pieces(self, text: TextPart, max_tokens: int) -> list[str]:
        """Split the text into answers of at most `max_tokens`, at ends of sentences if possible;
        empty if none can be spoken.

        Raises: BadInput if it contains a control token.
        """
        ...

    def transcription_prompt(self, language: str | None = None, where: str = "language") -> str:
        """Return a question, to be sent with an audio clip, whose answer is the transcription
        alone.

        `language`: the one that is spoken, as a code (`en`, `en-US`) or an English name; by default
        the model detects it.
        Raises: UnsupportedValue listing the languages; `where` names the user's field.
        """
        ...

    def detokenizer(self) -> Detokenizer: ...

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Return a prompt's ids as a text for people, in which `[audio]` stands for each clip."""
        ...

    def voices(self) -> list[str]:
        """Return the names of the checkpoint's voices, the default one first."""
        ...

    def voice(self, wanted: str | None, where: str = ...) -> str:
        """Return the checkpoint's voice for a name, also one of OpenAI's; the default for None.
        `where` names the user's field.

        Raises: BadInput listing the voices.
        """
        ...

    def examples(self) -> list[str]:
        """Return the example questions of the checkpoint, if it has any."""
        ...

    def end_ids(self) -> frozenset[int]: ...

    def sampling(self) -> Mapping[str, Mapping[str, float | int]]:
        """Return the checkpoint's sampling defaults by stage: fields of `Sampling`."""
        ...

    def num_prompt_audio_tokens(self, spec: RequestSpec) -> int:
        """Count the audio positions of the prompt."""
        ...

    def num_answer_audio_tokens(self, num_samples: int) -> int:
        """Return the number of audio tokens (codec frames) of an answer with `num_samples`."""
        ...


def load_frontend(reference: str, checkpoint: Path, limits: Limits) -> Frontend:
    """Import "module:name" as the graph declares it and construct it for a checkpoint folder.

    Raises: ConfigError if the checkpoint lacks a file that the frontend reads.
    """
    module, _, name = reference.partition(":")
    build = getattr(import_module(module), name, None)
    if build is None:
        raise ConfigError(f"frontend {reference!r} does not exist", param="graph")
    return cast(Frontend, build(checkpoint, limits))
