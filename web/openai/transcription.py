"""POST /v1/audio/transcriptions: speech to text; and the same for other modules. Knows no stage."""

import zlib
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.errors import SHOWN_CHARS, BadInput, FleetError, UnsupportedValue
from fleet.core.ids import RequestId, new_request_id
from fleet.processing import AudioPart, Message, Recording, TextPart
from fleet.processing.base import AudioSource
from web.gateway.answer import AnswerStream, TextPiece
from web.gateway.gateway import ActiveRequest, Gateway
from web.gateway.stored_body import stored_body
from web.http.body import body_memory_of, read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.forms import open_form
from web.http.json_response import json_response
from web.http.middleware import request_id_of
from web.http.sse import event, send_stream
from web.schema.audio import TranscriptionForm, ignored_of, parse_transcription
from web.schema.chat import ChatOptions
from web.schema.fields.common import ONE_FILE

UNKNOWN_LANGUAGE = "unknown"


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int


class TranscriptionTokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputDetails


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    usage: TranscriptionTokenUsage


class TranscriptionSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One segment over the whole clip, since the model gives no times within it.

    `tokens`, `avg_logprob` and `no_speech_prob` are not measured: with these values, clients that filter by them keep it.
    Units: seconds. Source: openai 3.54, `TranscriptionSegment`.
    """

    id: int = 0
    seek: int = 0
    start: float = 0.0
    end: float
    text: str
    tokens: list[int] = []
    temperature: float
    avg_logprob: float = 0.0
    compression_ratio: float
    no_speech_prob: float = 0.0


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["duration"] = "duration"
    seconds: float


class VerboseTranscription(msgspec.Struct, frozen=True, kw_only=True):
    """`verbose_json`; `language` is the one that the client gave. Units: seconds. Source: openai 3.54, `TranscriptionVerbose`."""

    task: Literal["transcribe"] = "transcribe"
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage


class TranscriptTextDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TranscriptTextDone(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TranscriptionTokenUsage


async def transcribe(gateway: Gateway, recording: Recording, language: str | None = None) -> str:
    """Transcribe a recording. If the caller is cancelled, no request remains.

    Raises: FleetError; BadInput if the audio is too short or too long.
    """
    active = await submit_transcription(gateway, recording, new_request_id(), language=language)
    async with active.answer as answer:
        return "".join([text async for text in _texts(answer)])


async def submit_transcription(
    gateway: Gateway,
    audio: AudioSource,
    request_id: RequestId,
    *,
    temperature: float | None = None,
    language: str | None = None,
) -> ActiveRequest:
    """Submit a transcription, greedy by default. Raises: the errors of `Gateway.submit`."""
    prompt = TextPart(text=gateway.frontend.transcription_prompt(language), where="prompt")
    messages = (Message(role="user", content=(AudioPart(data=audio, where="file"), prompt)),)
    options = ChatOptions(model=gateway.model, temperature=temperature or 0.0)
    stored = stored_body(options, (Message(role="user", content=prompt),))
    return await gateway.submit_chat(options, messages, request_id, stored=stored, where="file")


class TranscriptionEndpoint:
    """An ASGI app and not a function, so that a disconnect cancels the work."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await read_body(request, self._gateway.config.limits.max_body_bytes)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise BadInput("content-type: send a form, multipart/form-data, with the audio file as its field file")
        async with open_form(request.headers, raw) as form:
            fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str) and name != "file"]
            form_fields = parse_transcription(fields)
            self._gateway.check_model(form_fields.model or self._gateway.model)
            file = await _file_of(form)
            body_memory_of(scope).reserve(len(file))  # a copy out of `raw`
        answer = self._answer(form_fields, file, scope, receive, send)
        del raw, file  # they may be large, and are not needed during the answer
        await until_disconnect(receive, answer)

    async def _answer(self, form_fields: TranscriptionForm, file: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        active = await submit_transcription(
            self._gateway, file, request_id_of(scope), temperature=form_fields.temperature, language=form_fields.language
        )
        headers = active.headers(sorted(ignored_of(form_fields)))
        del file
        body_memory_of(scope).free()
        async with active.answer as answer:
            if form_fields.stream:
                await send_stream(send, headers, _events(answer))
                return
            text = "".join([text async for text in _texts(answer)])
            await _response(form_fields, answer, text, headers)(scope, receive, send)


def _response(form_fields: TranscriptionForm, answer: AnswerStream, text: str, headers: dict[str, str]) -> Response:
    if form_fields.response_format == "text":
        return PlainTextResponse(text, headers=headers)
    transcription: msgspec.Struct = Transcription(text=text, usage=_usage(answer))
    if form_fields.response_format == "verbose_json":
        transcription = _verbose(form_fields, answer, text)
    return json_response(transcription, headers=headers)


def _verbose(form_fields: TranscriptionForm, answer: AnswerStream, text: str) -> VerboseTranscription:
    seconds = round(sum(clip.num_samples / clip.rate_hz for clip in answer.spec.audio), 3)
    raw = text.encode()
    segment = TranscriptionSegment(
        end=seconds, text=text, temperature=form_fields.temperature or 0.0,
        compression_ratio=round(len(raw) / len(zlib.compress(raw)), 3),
    )  # fmt: skip
    return VerboseTranscription(
        language=form_fields.language or UNKNOWN_LANGUAGE, duration=seconds, text=text, segments=[segment] if text else [],
        usage=DurationUsage(seconds=seconds),
    )  # fmt: skip


async def _file_of(form: FormData) -> bytes:
    """Read the uploaded file of the form. Raises: BadInput, UnsupportedValue naming the field."""
    file, *further = form.getlist("file") or [None]
    if isinstance(file, str) and not further:
        raise BadInput("file: send the audio as a file, not as text", param="file")
    others = [name for name, value in form.multi_items() if name != "file" and isinstance(value, UploadFile) and value.size]
    if further or (file is not None and others):
        field = "file" if further else others[0][:SHOWN_CHARS]
        raise UnsupportedValue(f"{field}: {ONE_FILE}", param=field)
    if not isinstance(file, UploadFile):
        raise BadInput("file: this field is required", param="file")
    return await file.read()


async def _texts(answer: AnswerStream) -> AsyncIterator[str]:
    async for piece in answer.pieces():
        if isinstance(piece, TextPiece):
            yield piece.text


async def _events(answer: AnswerStream) -> AsyncIterator[bytes]:
    texts: list[str] = []
    try:
        async for text in _texts(answer):
            texts.append(text)
            yield event(TranscriptTextDelta(delta=text))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    yield event(TranscriptTextDone(text="".join(texts), usage=_usage(answer)))


def _usage(answer: AnswerStream) -> TranscriptionTokenUsage:
    usage = answer.usage()
    prompt = usage.prompt_tokens_details
    return TranscriptionTokenUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputDetails(text_tokens=prompt.text_tokens, audio_tokens=prompt.audio_tokens),
    )
