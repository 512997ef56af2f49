"""The chat request as types, and its validation; every error is one sentence that names the field.

Knows no stage and no limit of the deployment, which `web/gateway/sampling.py` and the frontend
check.
"""

import re
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
)
from pydantic_core import from_json

from fleet.core.errors import SHOWN_CHARS, BadInput, UnsupportedValue
from web.http.json_bounds import check_json, max_keys
from web.schema.answer_rules import AnswerRule, AnswerRules
from web.schema.body import Body
from web.schema.continuation import check_continuation
from web.schema.fields.chat import CHAT
from web.schema.fields.table import Given
from web.schema.token_fields import LogprobFields, TokenFields, unset
from web.schema.tools import ToolFields
from web.schema.unserved import UnservedValue, check_part, check_role

MAX_SEED = 2**63 - 1
MAX_STOPS = 4
MAX_CHOICES = 4
MAX_STAGES = 64
MAX_STAGE_FIELDS = 64
"""Limit of the keys in each section of `fleet`, including unknown keys; `MAX_STAGES` limits the
sections.
"""
MAX_FORMAT_CHARS = 128
PART_TYPES = (
    *("text", "input_text", "output_text", "input_audio", "audio_url", "input_json"),
    *("predicate", "choice", "score"),
)
"""Types of content parts and questions, which are tags in pydantic's locations."""
MAX_NAME_CHARS = 256
MAX_CALLS = 128
"""Limit of the calls in one message."""

InputFormat = Literal[
    "wav",
    "mp3",
    "mpeg",
    "mpga",
    "flac",
    "ogg",
    "oga",
    "opus",
    "webm",
    "mp4",
    "m4a",
    "aac",
    "amr",
    "3gp",
    "3gpp",
]
"""Names that clients use for the file formats that can be read; see `fleet/processing/audio.py`."""
_MEDIA_TYPE = re.compile(r"(?:(?:audio|video)/)?(?:x-|vnd\.|\.)?([^;]*)")
AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]
Modality = Literal["text", "audio"]


BodyT = TypeVar("BodyT", bound=Body)


def _format_name(value: object) -> object:
    """Return the format in a format name or media type, such as "wav" for "audio/x-wav; codecs=1";
    None for an empty value.
    """
    if not isinstance(value, str) or len(value) > MAX_FORMAT_CHARS:
        return value
    found = _MEDIA_TYPE.match(value.strip().lower())
    name = found[1].strip() if found is not None else ""
    return "wav" if name == "wave" else name or None


class InputAudio(Body):
    """Audio in a message, base64. `format` is validated but not used, since the file's header
    determines the format. Raw samples have no header, so they must be sent as WAV.
    """

    data: str
    format: Annotated[InputFormat | None, BeforeValidator(_format_name)] = None


class AudioUrl(Body):
    url: str

    @field_validator("url")
    @classmethod
    def _inline(cls, url: str) -> str:
        if url.lstrip()[:5].lower() != "data:":
            raise UnservedValue(
                "only data: URLs are read, since this server fetches nothing; send the audio itself"
            )
        return url


class TextPartBody(Body):
    type: Literal["text"]
    text: str


class InputAudioPartBody(Body):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPartBody(Body):
    type: Literal["audio_url"]
    audio_url: AudioUrl


PartBody = Annotated[
    TextPartBody | InputAudioPartBody | AudioUrlPartBody,
    Field(discriminator="type"),
    BeforeValidator(check_part),
]


def list_tag(value: object) -> str:
    """Return the tag of pydantic's union branch for a value that is a string or a list."""
    return ":list" if isinstance(value, list) else ":string"


Content = Annotated[
    Annotated[str, Tag(":string")]
    | Annotated[list[PartBody], Field(min_length=1, fail_fast=True), Tag(":list")],
    Discriminator(list_tag),
]


class AudioReference(Body):
    """Reference to an earlier spoken answer of this server."""

    id: str


class FunctionField(Body):
    """`arguments`: JSON text, as the model wrote it."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    arguments: str = ""


class CallField(Body):
    """A function call in an earlier answer."""

    id: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    type: Literal["function"] = "function"
    function: FunctionField


Calls = Annotated[list[CallField], Field(max_length=MAX_CALLS, fail_fast=True)]


class MessageBody(Body):
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(check_role)
    ]
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    content: Content | None = None
    audio: AudioReference | None = None
    tool_calls: Calls | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


class VoiceReference(Body):
    id: str


def _voice_tag(value: object) -> str:
    return ":object" if isinstance(value, dict | VoiceReference) else ":string"


Voice = Annotated[
    Annotated[str, Tag(":string")] | Annotated[VoiceReference, Tag(":object")],
    Discriminator(_voice_tag),
]


def voice_name(voice: Voice | None) -> str | None:
    return voice if voice is None or isinstance(voice, str) else voice.id


class AudioOptions(Body):
    voice: Voice | None = None
    format: AudioFormat | None = None


class StreamOptions(Body):
    """Options of a streamed answer. With `include_event_ids` each event has an id, from which the
    resume route continues the stream; load tools cannot parse the lines with ids.

    With `include_wav_headers` each piece of audio is a WAV file of its own, as vllm-omni's
    benchmark expects.
    """

    include_usage: bool | None = None
    include_event_ids: bool | None = None
    include_wav_headers: bool | None = None


Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=1_000_000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]
MaxTokens = Annotated[int, Field(ge=1, le=1_000_000)]
MinTokens = Annotated[int, Field(ge=0, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
CacheKey = Annotated[str, Field(min_length=1, max_length=64)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


Stop = Annotated[
    Annotated[StopString, Tag(":string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag(":list")],
    Discriminator(list_tag),
]


class SamplingFields(Body):
    """Sampling options of one stage in a request. `top_k` -1 and 0 mean no limit."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stop: Stop | None = None


class StageFields(SamplingFields):
    """A section of `fleet`: sampling options of one stage. Unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


StageSections = Annotated[
    dict[str, Annotated[StageFields, max_keys(MAX_STAGE_FIELDS)]], max_keys(MAX_STAGES)
]


class AnswerOptions(SamplingFields, AnswerRules, TokenFields):
    """Options of an answer in text. `fleet` sets the sampling of single stages, by the graph's
    stage names.

    `prompt_cache_key` names the conversation: a turn reuses the computed prefix that it shares with
    the previous turn. If `store` is false, the answer is never used for training.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: CacheKey | None = None
    fleet: StageSections | None = None
    store: bool | None = None

    @cached_property
    def rule(self) -> AnswerRule | None:
        """The rule for the answer; None for free text. Raises: BadInput if two fields set rules, a
        rule is too long, or its schema is missing.
        """
        return self.find_rule()

    @property
    def wants(self) -> tuple[Modality, ...]:
        return ("text",)

    @property
    def voice(self) -> str | None:
        """Name of the voice that speaks the answer; None for the default one."""
        return None

    @property
    def length_limit(self) -> tuple[str, int | None]:
        """Name of the field that sets the maximum length of the answer, and the length in tokens;
        None if the request sets none.
        """
        return "max_tokens", self.max_tokens

    def check_length_limit(self) -> None:
        """Check that no two fields set different length limits. Raises: BadInput."""
        where, limit = self.length_limit
        if where != "max_tokens" and self.max_tokens not in (None, limit):
            reason = f"{where} sets another limit, {limit}; send only one"
            raise BadInput(f"max_tokens: {reason}", param="max_tokens")

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Always None, since these answers have no log probabilities; `LogprobFields` overrides
        this.
        """
        return None


class ChatOptions(AnswerOptions, ToolFields):
    """Options of a chat, without its messages."""

    modalities: (
        Annotated[list[Modality], Field(min_length=1, max_length=2, fail_fast=True)] | None
    ) = None
    audio: AudioOptions | None = None
    max_completion_tokens: MaxTokens | None = None

    @property
    def wants(self) -> tuple[Modality, ...]:
        return tuple(self.modalities or ("text",))

    @property
    def voice(self) -> str | None:
        return voice_name(self.audio.voice) if self.audio is not None else None

    @property
    def length_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class ChatBody(LogprobFields, ChatOptions):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)]
    n: Annotated[Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None, BeforeValidator(unset)] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message)

    @cached_property
    def ignored(self) -> tuple[Given, ...]:
        """The fields that have a value but no effect."""
        return tuple(CHAT.ignored(self))


def parse_chat(body: bytes) -> ChatBody:
    """Parse and validate the body of a chat request.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    chat = parse_json(ChatBody, body)
    CHAT.check(chat)
    _ = chat.ignored, chat.rule  # found here, in the thread of a large body
    chat.check_length_limit()
    _check_choices(chat)
    check_continuation(
        chat.continue_final_message,
        chat.add_generation_prompt,
        last_role=chat.messages[-1].role,
        spoken="audio" in chat.wants,
    )
    return chat


def _check_choices(chat: ChatBody) -> None:
    """Refuse what a chat with several choices cannot have. Raises: UnsupportedValue."""
    if (chat.n or 1) == 1:
        return
    if "audio" in chat.wants:
        raise UnsupportedValue("n: one answer can be spoken; use n=1, or ask for text", param="n")
    if chat.stream_options is not None and chat.stream_options.include_event_ids:
        where = "stream_options.include_event_ids"
        raise UnsupportedValue(f"{where}: only one answer can be resumed; use n=1", param=where)


def parse_json(kind: type[BodyT], body: bytes) -> BodyT:
    """Parse and validate a JSON body of the type `kind`.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    try:
        return kind.model_validate(read_json(body))
    except ValidationError as error:
        raise bad_input(error) from error


def read_json(body: bytes) -> object:
    """Parse a JSON body without validation. Pydantic must not parse it, since its error would copy
    the whole text while it holds the interpreter lock.

    Raises: BadInput, InputTooLarge.
    """
    check_json(body)
    try:
        return from_json(body)
    except ValueError as error:
        raise BadInput(f"the body is not valid JSON: {error}") from error


def bad_input(error: ValidationError) -> BadInput:
    """Return the first of the validation errors as a BadInput: one sentence that names the
    field.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    param = _param(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if isinstance(first.get("ctx", {}).get("error"), UnservedValue):
        return UnsupportedValue(f"{param}: {message}", param=param)
    if first["type"] == "missing":
        message = "this field is required"
    elif first["type"] == "union_tag_not_found":
        param, message = f"{param}.type", "this field is required"
    elif first["type"] == "union_tag_invalid":
        tag = str(first.get("ctx", {}).get("tag"))
        message = message.replace(tag, tag[:SHOWN_CHARS])
    elif first["type"] == "extra_forbidden":
        message = "no such field; use one of " + ", ".join(StageFields.model_fields)
    return BadInput(f"{param or 'the body'}: {message}", param=param or None)


def _param(loc: tuple[int | str, ...]) -> str:
    """Return the path of a field as OpenAI writes it: `messages[0].content[1].input_audio.format`.

    `loc` is pydantic's location, in which the tags of union branches are skipped: Fleet's own tags
    begin with a colon; the tag of a content part follows an index.
    """
    path = ""
    after_index = False
    for piece in loc:
        if isinstance(piece, int):
            path += f"[{piece}]"
        elif not (piece.startswith(":") or (after_index and piece in PART_TYPES)):
            path += f".{piece[:SHOWN_CHARS]}" if path else piece[:SHOWN_CHARS]
        after_index = isinstance(piece, int)
    return path
