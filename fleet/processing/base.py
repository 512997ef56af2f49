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
    """Audio of a message: its source, or once it is decoded its samples, mono at the frontend's `audio_rate_hz`.

    `where` names the field of the user's input, for error messages.
    """

    data: AudioSource | Samples
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. A turn given as a plain string is kept as one: chat templates may render the two differently."""

    role: str
    content: TextPart | tuple[TextPart | AudioPart, ...]


GivenAnswer = TextPart | tuple[int, ...]
"""An answer that is not drawn: all of it, as text; or the tokens it begins with, which are all of it if an end token is last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked chat, its sampling resolved for every stage it runs. `voice` matters where `spoken`.

    `where` and `voice_where` name the fields of the user's input that the prompt as a whole and the voice come from.
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
        contents = [message.content for message in self.messages if isinstance(message.content, tuple)]
        return [part for content in contents for part in content if isinstance(part, AudioPart)]

    def with_samples(self, clips: Sequence[Samples]) -> "ChatRequest":
        """Return the chat with the samples of each audio part in place of its file."""
        left = iter(clips)

        def decoded(part: TextPart | AudioPart) -> TextPart | AudioPart:
            return replace(part, data=next(left)) if isinstance(part, AudioPart) else part

        def turn(message: Message) -> Message:
            if isinstance(message.content, TextPart):
                return message
            return replace(message, content=tuple(decoded(part) for part in message.content))

        return replace(self, messages=tuple(turn(message) for message in self.messages))


class Detokenizer(Protocol):
    """Token ids of one answer, in order, to text; never half a character."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids make certain."""
        ...

    def finish(self) -> str:
        """What was held back; incomplete bytes become U+FFFD."""
        ...


class Frontend(Protocol):
    """One model's prompt processing. Thread-safe: `prepare` runs in worker threads.

    Units: `sample_rate_hz` of the answer's audio; 0 where the model does not speak. `audio_rate_hz` of the audio in prompts;
    0 where the model takes none.
    """

    @property
    def sample_rate_hz(self) -> int: ...
    @property
    def audio_rate_hz(self) -> int: ...

    def prepare(self, chat: ChatRequest) -> tuple[RequestSpec, bytes | None]:
        """The request and its audio blob (float32 mono, clips one after another). Audio that is not decoded yet is decoded here.

        Raises: BadInput, InputTooLarge naming the field.
        """
        ...

    def check_text(self, text: TextPart) -> None:
        """Whether it can be part of a prompt, before there is one. Raises: BadInput if it holds a control token."""
        ...

    def speech_prompt(self, text: str) -> str:
        """What to ask so that the answer to be expected is this text: it is given then, but speech hangs on the question too."""
        ...

    def speech_pieces(self, text: TextPart, max_tokens: int) -> list[str]:
        """The text in pieces, each to be given as an answer of at most so many tokens; of whole sentences where possible.
        Empty where nothing of it can be said.

        Raises: BadInput if it holds a control token.
        """
        ...

    def transcription_prompt(self) -> str:
        """What to ask so that the answer is what an audio clip beside it says, and nothing else."""
        ...

    def detokenizer(self) -> Detokenizer: ...

    def voices(self) -> list[str]:
        """Names of the checkpoint's voices, the default one first."""
        ...

    def voice(self, wanted: str | None, where: str = ...) -> str:
        """The checkpoint's voice for a name, OpenAI's names included; the default one for None. `where` names the user's field.

        Raises: BadInput naming the voices there are.
        """
        ...

    def examples(self) -> list[str]:
        """Questions that the checkpoint's makers suggest; empty where they suggest none."""
        ...

    def end_ids(self) -> frozenset[int]: ...

    def sampling(self) -> Mapping[str, Mapping[str, float | int]]:
        """How the checkpoint says that its stages sample, by stage: fields of `Sampling`."""
        ...

    def num_prompt_audio_tokens(self, spec: RequestSpec) -> int:
        """How many of the prompt's positions are audio."""
        ...

    def num_answer_audio_tokens(self, num_samples: int) -> int:
        """How many audio tokens (codec frames) an answer of so many samples took."""
        ...


def load_frontend(reference: str, checkpoint: Path, limits: Limits) -> Frontend:
    """Import "module:name" as the graph declares it and build it for a checkpoint folder.

    Raises: ConfigError if the checkpoint lacks what the frontend reads.
    """
    module, _, name = reference.partition(":")
    build = getattr(import_module(module), name, None)
    if build is None:
        raise ConfigError(f"frontend {reference!r} does not exist", param="graph")
    return cast(Frontend, build(checkpoint, limits))
