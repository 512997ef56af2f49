"""Events that the server sends, in OpenAI's GA names with explicit nulls; and Fleet's extensions,
sent only to clients that request them.

Source: openai 3.54 types. Data only.
"""

import secrets

import msgspec
from msgspec import field

from web.realtime.audio.formats import AudioFormat, PcmFormat
from web.realtime.protocol.transcription_session import SessionBody


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(11)}"


def _event_id() -> str:
    return new_id("event")


class ServerEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    event_id: str = field(default_factory=_event_id)


class PartBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A content part of an item; fields that the part's type does not have are omitted."""

    type: str
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None


class SpokenInput(msgspec.Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """A content part with speech of the user; `transcript` is null until the speech has been
    transcribed.
    """

    transcript: str | None
    audio: str | None | msgspec.UnsetType = msgspec.UNSET


ItemPart = PartBody | SpokenInput


class ItemBody(msgspec.Struct, kw_only=True):
    id: str
    object: str = "realtime.item"
    type: str = "message"
    status: str
    role: str
    content: list[ItemPart]


class FunctionCallItem(msgspec.Struct, kw_only=True):
    """A function call; `arguments` are JSON text."""

    id: str
    object: str = "realtime.item"
    type: str = "function_call"
    status: str
    name: str
    call_id: str
    arguments: str


class FunctionOutputItem(msgspec.Struct, kw_only=True):
    """The result of a function call, as the client sent it."""

    id: str
    object: str = "realtime.item"
    type: str = "function_call_output"
    status: str
    call_id: str
    output: str


AnyItemBody = ItemBody | FunctionCallItem | FunctionOutputItem


class InputTokens(msgspec.Struct, kw_only=True):
    text_tokens: int = 0
    audio_tokens: int = 0
    cached_tokens: int = 0


class OutputTokenDetails(msgspec.Struct, kw_only=True):
    text_tokens: int = 0
    audio_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    total_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    input_token_details: InputTokens = field(default_factory=InputTokens)
    output_token_details: OutputTokenDetails = field(default_factory=OutputTokenDetails)


class FailureBody(msgspec.Struct, kw_only=True):
    type: str
    code: str | None
    message: str


class StatusDetails(msgspec.Struct, kw_only=True):
    type: str
    reason: str | None = None
    error: FailureBody | None = None


class ResponseOutput(msgspec.Struct, kw_only=True):
    format: AudioFormat = PcmFormat()
    voice: str


class ResponseAudio(msgspec.Struct, kw_only=True):
    output: ResponseOutput


class ResponseBody(msgspec.Struct, kw_only=True):
    object: str = "realtime.response"
    id: str
    status: str
    status_details: StatusDetails | None
    output: list[AnyItemBody]
    conversation_id: str | None
    output_modalities: list[str]
    max_output_tokens: int | str
    audio: ResponseAudio
    usage: UsageBody | None
    metadata: dict[str, str] | None
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Extension: warnings about fields that were ignored although the client may count on them;
    omitted if there are none.
    """


class ErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    code: str | None
    message: str
    param: str | None
    event_id: str | None


class TranscriptionError(msgspec.Struct, kw_only=True):
    type: str
    code: str | None
    message: str
    param: str | None


class Error(ServerEvent, tag="error", kw_only=True):
    error: ErrorDetail


class SessionCreated(ServerEvent, tag="session.created", kw_only=True):
    session: SessionBody


class SessionUpdated(ServerEvent, tag="session.updated", kw_only=True):
    session: SessionBody


class SpeechStarted(ServerEvent, tag="input_audio_buffer.speech_started", kw_only=True):
    audio_start_ms: int
    item_id: str


class SpeechStopped(ServerEvent, tag="input_audio_buffer.speech_stopped", kw_only=True):
    audio_end_ms: int
    item_id: str


class Committed(ServerEvent, tag="input_audio_buffer.committed", kw_only=True):
    previous_item_id: str | None
    item_id: str


class Cleared(ServerEvent, tag="input_audio_buffer.cleared", kw_only=True):
    pass


class OutputEvent(ServerEvent, kw_only=True):
    """Base of the events about the audio that the server plays over WebRTC."""

    response_id: str


class OutputStarted(OutputEvent, tag="output_audio_buffer.started", kw_only=True):
    pass


class OutputStopped(OutputEvent, tag="output_audio_buffer.stopped", kw_only=True):
    pass


class OutputCleared(OutputEvent, tag="output_audio_buffer.cleared", kw_only=True):
    pass


class TimeoutTriggered(ServerEvent, tag="input_audio_buffer.timeout_triggered", kw_only=True):
    audio_start_ms: int
    audio_end_ms: int
    item_id: str


class ItemAdded(ServerEvent, tag="conversation.item.added", kw_only=True):
    previous_item_id: str | None
    item: AnyItemBody


class ItemDone(ServerEvent, tag="conversation.item.done", kw_only=True):
    previous_item_id: str | None
    item: AnyItemBody


class ItemDeleted(ServerEvent, tag="conversation.item.deleted", kw_only=True):
    item_id: str


class ItemRetrieved(ServerEvent, tag="conversation.item.retrieved", kw_only=True):
    item: AnyItemBody


class ItemTruncated(ServerEvent, tag="conversation.item.truncated", kw_only=True):
    item_id: str
    content_index: int
    audio_end_ms: int


class TranscriptionUsage(msgspec.Struct, kw_only=True):
    type: str = "duration"
    seconds: float


class TranscriptionDelta(
    ServerEvent, tag="conversation.item.input_audio_transcription.delta", kw_only=True
):
    item_id: str
    content_index: int
    delta: str


class TranscriptionCompleted(
    ServerEvent, tag="conversation.item.input_audio_transcription.completed", kw_only=True
):
    item_id: str
    content_index: int
    transcript: str
    usage: TranscriptionUsage


class TranscriptionFailed(
    ServerEvent, tag="conversation.item.input_audio_transcription.failed", kw_only=True
):
    item_id: str
    content_index: int
    error: TranscriptionError


class ResponseCreated(ServerEvent, tag="response.created", kw_only=True):
    response: ResponseBody


class ResponseDone(ServerEvent, tag="response.done", kw_only=True):
    response: ResponseBody


class OutputItemAdded(ServerEvent, tag="response.output_item.added", kw_only=True):
    response_id: str
    output_index: int = 0
    item: AnyItemBody


class OutputItemDone(ServerEvent, tag="response.output_item.done", kw_only=True):
    response_id: str
    output_index: int = 0
    item: AnyItemBody


class PartEvent(ServerEvent, kw_only=True):
    """Base of the events about a response's content. A response has one item with one part, and
    function calls after it.
    """

    response_id: str
    item_id: str
    output_index: int = 0
    content_index: int = 0


class ContentPartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: PartBody


class ContentPartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: PartBody


class OutputAudioDelta(PartEvent, tag="response.output_audio.delta", kw_only=True):
    delta: str


class OutputAudioDone(PartEvent, tag="response.output_audio.done", kw_only=True):
    pass


class TranscriptDelta(PartEvent, tag="response.output_audio_transcript.delta", kw_only=True):
    delta: str


class TranscriptDone(PartEvent, tag="response.output_audio_transcript.done", kw_only=True):
    transcript: str


class TextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str


class CallEvent(ServerEvent, kw_only=True):
    """Base of the events about the arguments of a function call."""

    response_id: str
    item_id: str
    output_index: int
    call_id: str


class ArgumentsDelta(CallEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(CallEvent, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


class FleetEvent(ServerEvent, kw_only=True):
    """Base of Fleet's extensions, which are sent over the console's socket, and over `/v1/realtime`
    if its address contains `?fleet=1`.
    """


class State(FleetEvent, tag="fleet.state", kw_only=True):
    """The session entered the state `state`: listening, hearing, thinking, speaking or
    interrupted.
    """

    state: str


class Queue(FleetEvent, tag="fleet.queue", kw_only=True):
    """Position of a client in the queue for a session; 1 is the next to enter."""

    position: int


class RequestOf(FleetEvent, tag="fleet.request", kw_only=True):
    response_id: str
    request_id: str


class TimingPart(msgspec.Struct, kw_only=True):
    name: str
    ms: float


class Timing(FleetEvent, tag="fleet.timing", kw_only=True):
    """Latency of a response, and its division into parts. For a client that plays without delay,
    the parts add up to the time from the user's last voiced sample to the first voiced sample of
    the response. For a turn without speech the latency begins with the request, and for a text
    response it ends with the first text.

    `voice_to_voice_ms` is this time, or null unless turn and response are spoken, and the end of
    the turn's speech is known.
    `voiced_end_ms` is the position of the user's last voiced sample in the session's input; null if
    unknown. The part `silence` is the time from the first audio to the first voiced sample.
    """

    response_id: str
    request_id: str
    item_id: str
    voice_to_voice_ms: float | None
    voiced_end_ms: int | None
    parts: list[TimingPart]


class Voiced(FleetEvent, tag="fleet.voiced", kw_only=True):
    """The first voiced sample of a response was sent; `sample` is its position in the response's
    audio.
    """

    response_id: str
    sample: int


class WordsSent(FleetEvent, tag="fleet.words", kw_only=True):
    """Words whose audio was sent, if the voice tells when words end: for each, the characters of
    the response's text and the samples of its audio up to the end of the word.
    """

    response_id: str
    ends: list[tuple[int, int]]


class AudioSerial(FleetEvent, tag="fleet.audio", kw_only=True):
    """Announcement of binary frames: frames with this `serial` contain audio of the response, in
    its format, at `rate` Hz.
    """

    serial: int
    response_id: str
    item_id: str
    rate: int


class Resumed(FleetEvent, tag="fleet.resumed", kw_only=True):
    """A session continues over another socket. `transcript` is all text sent so far of the response
    under way; "" without a response, or if this gateway has not read the text yet.
    """

    session_id: str
    response_id: str | None
    item_id: str | None
    transcript: str


_encode = msgspec.json.Encoder().encode


def encode_event(event: ServerEvent) -> str:
    return _encode(event).decode()
