"""JSON responses of OpenAI's chat completions, models and voices as types. Data only. Source:
openai 3.52 types.
"""

import msgspec
from msgspec import UNSET, UnsetType

from web.schema.capabilities import Capabilities


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    audio_tokens: int
    text_tokens: int
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True, kw_only=True):
    audio_tokens: int
    text_tokens: int
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a chat completion. `completion_tokens` counts text and audio tokens, as
    OpenAI's service does.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class AudioDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Audio in an event of a streamed answer. `id` is only in the first delta of an answer, since
    clients concatenate the strings, and add the numbers, of all deltas.
    """

    id: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Function of a call. In a stream, the first delta has the name, and the arguments of all
    deltas together are JSON.
    """

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a function call in a streamed answer; only the first one has `id` and `type`."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function call in a whole answer."""

    id: str
    type: str = "function"
    function: CalledFunction


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    refusal: str | None | UnsetType = UNSET
    audio: AudioDelta | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ListedLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token with the logarithm of its probability. `bytes`: UTF-8 of the token, which may be a
    part of a character; `token` then has U+FFFD.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """A token of an answer, and the most likely tokens at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ListedLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprobs]
    refusal: None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a streamed chat completion. `modality` is the kind of its delta, "text" or "audio":
    a field of vllm-omni, which its benchmark reads.

    `warnings`, in the first and the last event, is about fields of the request that were ignored
    although the client may count on them.
    """

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    modality: str | UnsetType = UNSET
    usage: Usage | None | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class AudioMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    audio: AudioMessage | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    warnings: list[str] | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The served model. `max_model_len`, a field of vLLM, is its context length in tokens, and
    `capabilities` is Fleet's own: clients ignore fields that they do not know.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "fleet"
    max_model_len: int
    capabilities: Capabilities


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


class SpeechModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str


class SpeechModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of GET /v1/audio/models, an extension. Source: Open WebUI, `get_available_models` in
    routers/audio.py.
    """

    models: list[SpeechModel]


class ListedVoice(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str


class VoiceList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of GET /v1/audio/voices, an extension. Source: Open WebUI, `get_available_voices`;
    vLLM-Omni, `uploaded_voices`.
    """

    voices: list[ListedVoice]
    uploaded_voices: list[str] = []
