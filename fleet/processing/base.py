"""The contract between the gateway and a model's prompt processing. Knows no HTTP and no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fleet.config.checkpoints import checkpoint_of
from fleet.config.schema import FleetConfig, Limits
from fleet.core.errors import ConfigError
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling, ToolUse
from fleet.processing.tool_calls.support import ToolSupport
from fleet.processing.tool_calls.tools import FunctionCall, ToolPrompt

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
    """Text of a message. `where`: field of the user's input that has the text, named in errors.
    `is_transcript`: True if the text was recognised in audio. Control tokens in such a text are
    read as ordinary text.
    """

    text: str
    where: str
    is_transcript: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPart:
    """Audio of a message. `data`: the audio as received or, once decoded, mono samples at the
    frontend's `audio_rate_hz`.

    `where`: field of the user's input that has the audio, named in errors. `name`: the client's
    name for the clip; "" for none.
    """

    data: AudioSource | Samples
    where: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A turn of a conversation. A plain string stays a string, since chat templates may render
    strings and parts differently.

    `name`: name of the speaker, if several speakers have the same role; "" if not given. Most chat
    templates do not write it. `calls`: functions that an assistant's message calls. `call_id`: id
    of the call whose result a message with the role `tool` has.
    """

    role: str
    content: TextPart | tuple[TextPart | AudioPart, ...]
    name: str = ""
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""


GivenAnswer = TextPart | tuple[int, ...]
"""An answer that the request supplies instead of having it sampled. A text is a whole answer. Token
ids are a whole answer if they end in an end token, otherwise its beginning; () supplies none.
"""


PlainPrompt = TextPart | tuple[int, ...]
"""A prompt that no chat template renders: text, to which the tokenizer adds its special tokens, or
token ids.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecognitionOptions:
    """Options of the recognition of a prompt's audio. `language`: code or English name; None lets
    the model detect the language. `temperature`: sampling temperature; None takes the most probable
    text. `prompt`: text that precedes the audio, for names and spellings. `times`: True to add the
    times of segments and words to the transcript.
    """

    language: str | None = None
    temperature: float | None = None
    prompt: str = ""
    times: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A validated chat request, with the sampling parameters of every stage that it uses.

    `stages`: stages to run; () lets the graph choose by `outputs`. `speech_text`: text to speak
    instead of an answer. `plain`: prompt used in place of `messages`. `hearing`: options of the
    stage that recognises audio, in graphs with such a stage. `voice`: name of the voice, used if
    `spoken`. `where`: field of the user's input that has the prompt, named in errors;
    `voice_where`: field that has the voice. `continues`: True to continue the last message.
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
    stages: tuple[StageName, ...] = ()
    speech_text: TextPart | None = None
    plain: PlainPrompt | None = None
    hearing: RecognitionOptions = RecognitionOptions()
    continues: bool = False
    tools: ToolPrompt = ToolPrompt()

    @property
    def audio_parts(self) -> list[AudioPart]:
        """All audio of the chat, in order."""
        contents = [
            message.content for message in self.messages if isinstance(message.content, tuple)
        ]
        return [part for content in contents for part in content if isinstance(part, AudioPart)]

    def with_samples(self, clips: Sequence[Samples]) -> "ChatRequest":
        """Return a copy of the chat in which the audio parts have these decoded samples instead of
        files, in the order of `audio_parts`.
        """
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

    def begin_after(self, ids: Sequence[int]) -> None:
        """Set the ids that precede the answer, as context for decoding its first ids. Call this
        before `add`. The text of the preceding ids is not returned.
        """
        ...

    def add(self, ids: Sequence[int]) -> str:
        """Add the answer's next token ids; return the text that no later id can change."""
        ...

    def finish(self) -> str:
        """Return the text that was held back; incomplete bytes become U+FFFD."""
        ...


class Frontend(Protocol):
    """Prompt processing of a model in the gateway. Thread-safe: `prepare` runs in worker threads.

    `sample_rate_hz`: sample rate of the answer's audio; 0 if the model does not speak.
    `audio_rate_hz`: sample rate of audio in prompts; 0 if the model accepts no audio. `positions`:
    context length of the model, for prompt and answer together; None if its checkpoint states none.
    `tools`: what the checkpoint knows of function calls.
    """

    tools: ToolSupport

    @property
    def sample_rate_hz(self) -> int: ...
    @property
    def audio_rate_hz(self) -> int: ...
    @property
    def positions(self) -> int | None: ...

    def prepare(self, chat: ChatRequest) -> tuple[RequestSpec, bytes | None]:
        """Return the request and its audio blob (float32 mono, clips concatenated). Decodes audio
        that is not decoded yet.

        Raises: BadInput, InputTooLarge naming the field.
        """
        ...

    def check_text(self, text: TextPart) -> None:
        """Check that a text may be part of a prompt. Raises: BadInput if the text contains a
        control token.
        """
        ...

    def speech_prompt(self, text: str) -> str:
        """Return a question to which `text` is the natural answer. A request that speaks a supplied
        answer sends this question, since the voice depends on the question too.
        """
        ...

    def speech_pieces(self, text: TextPart, max_tokens: int) -> list[str]:
        """Split a text into pieces to be spoken one after another, each of at most `max_tokens`
        tokens, at ends of sentences if possible; empty if no part of the text can be spoken.

        Raises: BadInput if the text contains a control token.
        """
        ...

    def transcription_prompt(self, language: str | None = None, where: str = "language") -> str:
        """Return a question that, sent together with an audio clip, makes the model answer with the
        transcription alone; "" if the model takes no such question.

        `language`: spoken language as a code (`en`, `en-US`) or an English name; by default the
        model detects it. `where`: field of the user's input that has the language. Raises:
        UnsupportedValue listing the languages.
        """
        ...

    def detokenizer(self, tools: ToolUse | None = None) -> Detokenizer:
        """Return a detokenizer of one answer. `tools`: how the answer may call functions; the
        control tokens of calls are part of its text then.
        """
        ...

    def prompt_text(self, ids: Sequence[int], heard: Sequence[str] = ()) -> str:
        """Return the ids of a prompt as text for people to read, with `[audio]` in place of each
        clip, or `[audio: ...]` with its transcript where `heard` has one.
        """
        ...

    def languages(self) -> list[str]:
        """Return the codes of the languages of speech that the model understands; empty if it
        accepts no audio, or its checkpoint names none.
        """
        ...

    def voices(self) -> list[str]:
        """Return the names of the checkpoint's voices, the default one first."""
        ...

    def voice(self, wanted: str | None, where: str = ...) -> str:
        """Return the checkpoint's voice for a name, which may be one of OpenAI's; the default voice
        for None. `where`: field of the user's input that has the name.

        Raises: BadInput listing the voices.
        """
        ...

    def examples(self) -> list[str]:
        """Return the example questions that come with the checkpoint; empty if there are none."""
        ...

    def end_ids(self) -> frozenset[int]: ...

    @property
    def num_ids(self) -> int:
        """Number of token ids that the model can sample."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, which may be a part of a character;
        empty for an id that the tokenizer does not have.
        """
        ...

    def word_ids(self, words: Sequence[str], where: str) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of token ids that write a word of `words`. `where`: field of the
        user's input that has the words. Raises: BadInput for a word without tokens.
        """
        ...

    def sampling(self) -> Mapping[str, Mapping[str, float | int]]:
        """Return the checkpoint's sampling defaults: for each stage, values by the names of the
        fields of `Sampling`.
        """
        ...

    def num_prompt_audio_tokens(self, spec: RequestSpec) -> int:
        """Return the number of prompt positions that audio occupies."""
        ...

    def num_answer_audio_tokens(self, num_samples: int) -> int:
        """Return the number of audio tokens (codec frames) of an answer whose audio has
        `num_samples` samples.
        """
        ...


def open_frontend(config: FleetConfig, checkpoint: Path) -> Frontend:
    """Construct the frontend of a deployment's graph. `checkpoint`: the deployment's folder.

    A frontend of a graph whose stages have folders of their own is constructed with a mapping of
    stages to folders. Raises: ConfigError if a checkpoint lacks a file that the frontend reads.
    """
    graph = config.graph_declaration()
    if not graph.has_stage_checkpoints:
        return load_frontend(graph.frontend, checkpoint, config.limits)
    folders = {stage.name: checkpoint_of(config, stage.name, checkpoint) for stage in graph.stages}
    return load_frontend(graph.frontend, folders, config.limits)


def load_frontend(
    reference: str, checkpoint: Path | Mapping[StageName, Path], limits: Limits
) -> Frontend:
    """Import "module:name" as the graph declares it and construct it for a checkpoint: its folder,
    or the folder of each stage.

    Raises: ConfigError if the checkpoint lacks a file that the frontend reads.
    """
    module, _, name = reference.partition(":")
    build = getattr(import_module(module), name, None)
    if build is None:
        raise ConfigError(f"frontend {reference!r} does not exist", param="graph")
    return cast(Frontend, build(checkpoint, limits))
