"""POST /v1/chat/completions: text and speech, streamed or not, in OpenAI's shapes. Knows no
stage.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError, UnsupportedValue
from fleet.core.ids import AUDIO, COMPLETION, shown_id
from fleet.core.request import RequestSpec
from web.gateway.answer import (
    AnswerStream,
    AudioPiece,
    HeardPiece,
    Piece,
    Position,
    TextPiece,
    skip_sent,
)
from web.gateway.answer_calls import CallPiece, CollectedCall, collect
from web.gateway.answer_logprobs import TokenLogprob
from web.gateway.choices import choices_of, merged, submitted, summed_usage
from web.gateway.gateway import MIRROR, USAGE, WAV, Gateway
from web.gateway.ignored_fields import IgnoredFieldLog, warning_of
from web.gateway.prepared_chat import PreparedChat
from web.gateway.tool_requests import WARNED_FIELD, ignored_tools
from web.http.body import body_memory_of, read_body
from web.http.disconnect import is_stalled, until_disconnect
from web.http.errors import envelope_of
from web.http.json_response import json_response
from web.http.middleware import request_id_of
from web.http.offload import parse_body
from web.http.sse import event, send_stream
from web.openai.audio_encoder import encode_whole
from web.openai.call_shapes import answer_calls, call_delta
from web.openai.logprobs import choice_logprobs
from web.schema.chat import AudioFormat, ChatBody, parse_chat
from web.schema.responses import (
    AnswerMessage,
    AudioDelta,
    AudioMessage,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)

STREAMED_FORMATS = ("pcm16", "wav")
"""Audio formats of streamed answers. Audio in a streamed `wav` is PCM16 without headers, as other
servers of this API send it, unless `stream_options` sets `include_wav_headers`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEnvelope:
    """Fields that all events of an answer share, and the options for the shape of the events."""

    id: str
    audio_id: str
    key: str
    """Name of the API key that sent the request. Only this key may refer to the audio later."""
    created: int
    model: str
    mirror: bool
    """True if the text is sent in `content`, since the request's modalities include text. The
    transcript of spoken audio is sent in any case.
    """
    spoken: bool
    usage: bool
    """True if the stream ends with an event with the token counts."""
    wav: bool
    """True if each streamed piece of audio is a WAV file of its own."""
    warned: tuple[str, ...]
    """Names of ignored fields that the answer warns about."""
    index: int = 0
    """Number of the choice, in an answer with several."""

    def chunk(
        self,
        delta: Delta,
        finish_reason: str | None = None,
        *,
        is_first: bool = False,
        logprobs: ChoiceLogprobs | None = None,
    ) -> bytes:
        choice = ChunkChoice(
            index=self.index, delta=delta, finish_reason=finish_reason, logprobs=logprobs
        )
        usage = None if self.usage else UNSET
        is_audio = delta.audio is not UNSET and delta.audio.data is not UNSET
        return event(
            ChatChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[choice],
                usage=usage,
                modality="audio" if is_audio else "text",
                warnings=self.listed_warnings() if is_first or finish_reason is not None else UNSET,
            )
        )

    def listed_warnings(self) -> list[str] | UnsetType:
        return [warning_of(name) for name in self.warned] or UNSET

    @staticmethod
    def of(spec: RequestSpec, gateway: Gateway) -> "ChatEnvelope":
        """Return the envelope of a request's answer. Only the request determines it, so that the
        events are the same at every gateway.
        """
        return ChatEnvelope(
            id=shown_id(spec.id, COMPLETION),
            audio_id=shown_id(spec.id, AUDIO),
            key=spec.key,
            created=spec.created_us // 1_000_000,
            model=gateway.model,
            mirror=MIRROR in spec.reply,
            spoken=gateway.is_spoken(spec),
            usage=USAGE in spec.reply,
            wav=WAV in spec.reply,
            warned=tuple(name for name in ignored_tools(spec) if name == WARNED_FIELD),
        )


class ChatEndpoint:
    """`POST /v1/chat/completions`. A raw ASGI app, so that a client disconnect cancels the request
    at any point.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ignored_log = IgnoredFieldLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await parse_body(
            parse_chat, await read_body(request, self._gateway.config.limits.max_body_bytes)
        )
        _check_format(body)
        answer = self._answer(body, scope, receive, send)
        del body  # it may be large, and is not needed during the answer
        await until_disconnect(receive, answer)

    async def _answer(self, body: ChatBody, scope: Scope, receive: Receive, send: Send) -> None:
        chat = await self._gateway.prepare(body, request_id_of(scope))
        asked = _Asked(
            num=body.n or 1,
            kind=_audio_format(body, "wav"),
            is_streamed=bool(body.stream),
            with_ids=bool(body.stream_options and body.stream_options.include_event_ids),
            headers=chat.headers(_ignored(body, chat)),
        )
        self._ignored_log.note(
            chat.spec.id, [name for name in ignored_tools(chat.spec) if name == WARNED_FIELD]
        )
        del body
        response = (
            await self._answer_once(chat, asked, scope, send)
            if asked.num == 1
            else await self._answer_repeatedly(chat, asked, scope, send)
        )
        if response is not None:
            await response(scope, receive, send)

    async def _answer_once(
        self, chat: PreparedChat, asked: "_Asked", scope: Scope, send: Send
    ) -> Response | None:
        """Send a streamed answer, or return the response with a whole one."""
        active = await self._gateway.submit_prepared(chat)
        async with active.answer as answer:
            answer.is_stalled = lambda: is_stalled(scope)
            reply = ChatEnvelope.of(answer.spec, self._gateway)
            body_memory_of(scope).free()
            if asked.is_streamed:
                lines = chat_events(
                    self._gateway, reply, answer, Position(), with_ids=asked.with_ids
                )
                await send_stream(send, asked.headers, lines)
                return None
            choice = await self._choice(reply, answer, asked.kind)
            return _completion(reply, [choice], answer.usage(), asked.headers)

    async def _answer_repeatedly(
        self, chat: PreparedChat, asked: "_Asked", scope: Scope, send: Send
    ) -> Response | None:
        """Stream the choices of a chat with several choices, or return the response with all
        choices. Such streams cannot be resumed: a client that does not read aborts the answers.
        """
        chats = choices_of(chat, asked.num, self._gateway.graph.main_stage.name)
        whole = ChatEnvelope.of(chat.spec, self._gateway)
        replies = [replace(whole, index=number) for number in range(asked.num)]
        body_memory_of(scope).free()
        if not asked.is_streamed:
            async with submitted(
                self._gateway,
                chats,
                lambda number, answer: self._choice(replies[number], answer, asked.kind),
            ) as running:
                made = await asyncio.gather(*running.tasks)
                return _completion(whole, made, summed_usage(running.answers), asked.headers)
        events = asyncio.Queue[bytes | None]()

        async def put_events(number: int, answer: AnswerStream) -> None:
            async for line in choice_events(self._gateway, replies[number], answer, Position()):
                events.put_nowait(line)

        async with submitted(self._gateway, chats, put_events) as choices:
            lines = _ended(whole, merged(choices, events), lambda: summed_usage(choices.answers))
            await send_stream(send, asked.headers, lines)
        return None

    async def _choice(self, reply: ChatEnvelope, answer: AnswerStream, kind: AudioFormat) -> Choice:
        """Read an answer to its end and return the choice of the completion; a spoken answer's
        transcript is stored, so that later requests can refer to the audio.
        """
        text: list[str] = []
        told: list[TokenLogprob] = []
        calls: list[CollectedCall] = []
        pcm = bytearray()
        async for piece in answer.pieces():
            if isinstance(piece, AudioPiece):
                pcm += piece.pcm
            elif isinstance(piece, CallPiece):
                collect(calls, piece)
            elif isinstance(piece, TextPiece):
                text.append(piece.text)
                told += piece.logprobs
        transcript = "".join(text)
        audio: AudioMessage | UnsetType = UNSET
        if reply.spoken:
            rate_hz = self._gateway.frontend.sample_rate_hz
            file = await asyncio.to_thread(
                encode_whole, bytes(pcm), rate_hz, "pcm" if kind == "pcm16" else kind
            )
            expires_at = await self._gateway.keep_transcript(reply.audio_id, transcript, reply.key)
            audio = AudioMessage(
                id=reply.audio_id,
                data=base64.b64encode(file).decode("ascii"),
                expires_at=expires_at,
                transcript=transcript,
            )
        content = transcript if reply.mirror and (transcript or not calls) else None
        return Choice(
            index=reply.index,
            message=AnswerMessage(content=content, audio=audio, tool_calls=answer_calls(calls)),
            logprobs=choice_logprobs(told, self._gateway.frontend)
            if answer.tells_logprobs
            else None,
            finish_reason=answer.finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Options of a request for the shape of its answer. `num`: number of choices; `kind`: format of
    whole audio; `with_ids`: True if events have ids; `headers`: response headers.
    """

    num: int
    kind: AudioFormat
    is_streamed: bool
    with_ids: bool
    headers: dict[str, str]


def _completion(
    reply: ChatEnvelope, choices: list[Choice], usage: Usage, headers: dict[str, str]
) -> Response:
    completion = ChatCompletion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=choices,
        usage=usage,
        warnings=reply.listed_warnings(),
    )
    return json_response(completion, headers=headers)


def chat_events(
    gateway: Gateway, reply: ChatEnvelope, answer: AnswerStream, sent: Position, *, with_ids: bool
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer after position `sent`, up to the end of the stream:
    the usage if the request asks for it, and [DONE]. `sent` is advanced.
    """
    events = choice_events(gateway, reply, answer, sent, with_ids=with_ids)
    return _ended(reply, events, answer.usage)


async def _ended(
    reply: ChatEnvelope, events: AsyncIterator[bytes], usage: Callable[[], Usage]
) -> AsyncIterator[bytes]:
    """Yield the events of a stream's choices, and what ends the stream: the usage, if it is asked
    for, and [DONE]. A failure becomes an error event, without [DONE].
    """
    try:
        async for line in events:
            yield line
    except FleetError as error:
        yield event(envelope_of(error))
        return
    if reply.usage:
        yield event(
            ChatChunk(
                id=reply.id, created=reply.created, model=reply.model, choices=[], usage=usage()
            )
        )
    yield b"data: [DONE]\n\n"


async def choice_events(
    gateway: Gateway,
    reply: ChatEnvelope,
    answer: AnswerStream,
    sent: Position,
    *,
    with_ids: bool = False,
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer after position `sent`, up to the finish reason;
    `sent` is advanced. The transcript of a spoken answer is stored at the end.

    The role is sent with the first piece: clients measure the time to the first token by the first
    event. If `with_ids` is True, the id of an event is the position after that event, from which
    any gateway can resume the stream. Raises: FleetError if the answer fails.
    """
    transcript: list[str] = []
    opening, audio_id = b"", UNSET
    if sent == Position():
        delta = Delta(role="assistant", content="" if reply.mirror else None, refusal=None)
        opening = reply.chunk(delta, is_first=True)
        audio_id = reply.audio_id
    async for piece in skip_sent(_with_transcript(answer.pieces(), transcript), sent):
        if isinstance(piece, HeardPiece) or (isinstance(piece, CallPiece) and piece.is_last):
            continue
        sent.advance(piece)
        chunk = reply.chunk(
            _delta(reply, piece, audio_id, gateway.frontend.sample_rate_hz),
            logprobs=_logprobs(piece, gateway),
        )
        yield opening + (f"id: {sent}\n".encode() if with_ids else b"") + chunk
        opening, audio_id = b"", UNSET
    if reply.spoken:
        expires_at = await gateway.keep_transcript(reply.audio_id, "".join(transcript), reply.key)
        yield opening + reply.chunk(Delta(audio=AudioDelta(id=audio_id, expires_at=expires_at)))
        opening = b""
    yield opening + reply.chunk(Delta(), finish_reason=answer.finish_reason)


async def _with_transcript(
    pieces: AsyncIterator[Piece], transcript: list[str]
) -> AsyncIterator[Piece]:
    async for piece in pieces:
        if isinstance(piece, TextPiece):
            transcript.append(piece.text)
        yield piece


def _delta(
    reply: ChatEnvelope,
    piece: TextPiece | AudioPiece | CallPiece,
    audio_id: str | UnsetType,
    rate_hz: int,
) -> Delta:
    if isinstance(piece, CallPiece):
        return call_delta(piece)
    if isinstance(piece, TextPiece):
        return Delta(
            content=piece.text if reply.mirror else UNSET,
            audio=AudioDelta(id=audio_id, transcript=piece.text) if reply.spoken else UNSET,
        )
    data = encode_whole(piece.pcm, rate_hz, "wav") if reply.wav else piece.pcm
    return Delta(audio=AudioDelta(id=audio_id, data=base64.b64encode(data).decode("ascii")))


def _logprobs(piece: Piece, gateway: Gateway) -> ChoiceLogprobs | None:
    """Return the log probabilities of the tokens that begin in a piece; None if there are none."""
    told = piece.logprobs if isinstance(piece, TextPiece) else ()
    return choice_logprobs(told, gateway.frontend) if told else None


def _audio_format(body: ChatBody, default: AudioFormat) -> AudioFormat:
    return (body.audio.format if body.audio is not None else None) or default


def _check_format(body: ChatBody) -> None:
    kind = _audio_format(body, "pcm16")
    if body.stream and "audio" in body.wants and kind not in STREAMED_FORMATS:
        raise UnsupportedValue(
            f"audio.format: {kind} cannot be streamed; use pcm16", param="audio.format"
        )


def _ignored(body: ChatBody, chat: PreparedChat) -> list[str]:
    unused = ["audio"] if body.audio is not None and not chat.spoken else []
    return sorted([*(given.where for given in body.ignored), *ignored_tools(chat.spec), *unused])
