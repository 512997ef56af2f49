"""Chat completions: the request body, the whole answer, and the decoding of a streamed answer after
its recording.
"""

from base64 import b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from fleet.lab.client.errors import StreamError
from fleet.lab.client.transport import ErrorMessage

DATA, DONE = b"data: ", b"[DONE]"
StageBounds = dict[str, dict[str, int | float]]


class EncodedAudio(msgspec.Struct, frozen=True):
    """An audio file in a request, encoded in base64."""

    data: str
    format: str = "wav"


class AudioContent(msgspec.Struct, frozen=True, tag="input_audio", tag_field="type"):
    input_audio: EncodedAudio


class TextContent(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | tuple[AudioContent | TextContent, ...]


class OutputAudio(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: str
    voice: str | None = None


class ChatStreamOptions(msgspec.Struct, frozen=True):
    """The `stream_options` of a streamed chat request. `include_event_ids`: whether events have ids
    from which the stream can be resumed, a Fleet extension.
    """

    include_usage: bool = True
    include_event_ids: bool | UnsetType = UNSET


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`. `fleet`: length and sampling limits per stage, a Fleet
    extension.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    modalities: tuple[str, ...] = ("text",)
    audio: OutputAudio | UnsetType = UNSET
    stream: bool = False
    stream_options: ChatStreamOptions | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    prompt_cache_key: str | UnsetType = UNSET
    store: bool | UnsetType = UNSET
    fleet: StageBounds | UnsetType = UNSET


class ReceivedAudio(msgspec.Struct, frozen=True):
    """Audio in an answer. `data`: base64 of an audio file, or of a PCM piece in a streamed
    answer.
    """

    data: str | None = None
    transcript: str = ""

    def decoded(self) -> bytes:
        return b64decode(self.data) if self.data else b""


class ReceivedMessage(msgspec.Struct, frozen=True):
    """Message of a whole answer, or the `delta` of a streamed chunk."""

    content: str | None = None
    audio: ReceivedAudio | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: ReceivedMessage
    finish_reason: str


class WholeAnswer(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """A whole chat answer. `audio`: audio file in the requested format, None for an answer without
    speech.
    """

    text: str
    finish_reason: str
    audio: bytes | None = None
    transcript: str = ""


class _ChunkChoice(msgspec.Struct, frozen=True):
    delta: ReceivedMessage


class _TokenDetails(msgspec.Struct, frozen=True):
    text_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens_details: _TokenDetails = _TokenDetails()


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_ChunkChoice, ...] = ()
    usage: _Usage | None = None
    error: ErrorMessage | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode

Piece = tuple[float, bytes]
"""Time of arrival, in seconds since the request was sent, and bytes of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecording:
    """The recorded bytes of a streamed answer, not decoded yet. Units: `sent_s` on
    `time.perf_counter`; times in `pieces` count from `sent_s`.
    """

    sent_s: float
    pieces: tuple[Piece, ...]
    request_id: str = ""


@dataclass(slots=True)
class StreamedAnswer:
    """A decoded streamed answer: its text and audio parts, each with the arrival time of its last
    byte. Audio is 16-bit PCM.
    """

    text: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    audio: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    prompt_tokens: int = 0
    text_tokens: int = 0

    def add(self, at_s: float, message: ReceivedMessage) -> None:
        if message.content:
            self.text.append((at_s, message.content))
        if message.audio is not None and (pcm := message.audio.decoded()):
            self.audio.append((at_s, pcm))


def read_stream(pieces: Iterable[Piece]) -> StreamedAnswer:
    """Decode a whole stream. Raises: StreamError if it carries an error, is no chat stream or stops
    before its end.
    """
    answer = StreamedAnswer()
    for at_s, chunk in _chunks(pieces):
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.text_tokens = chunk.usage.completion_tokens_details.text_tokens
        for choice in chunk.choices:
            answer.add(at_s, choice.delta)
    return answer


def _chunks(pieces: Iterable[Piece]) -> Iterator[tuple[float, _Chunk]]:
    count = 0
    for at_s, data in _events(pieces):
        if data == DONE:
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            raise StreamError(
                f"the stream holds an event that is no chunk of a chat ({error})"
            ) from error
        if chunk.error is not None:
            raise StreamError(f"the request failed: {chunk.error.message}")
        count += 1
        yield at_s, chunk
    raise StreamError(
        f"the stream stopped before its end, after {count} events; was a process killed?"
    )


def _events(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the data field of each server-sent event with its arrival time; comments and ids are
    left out.
    """
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from ((at_s, line.removeprefix(DATA)) for line in lines if line.startswith(DATA))
