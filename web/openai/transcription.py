"""POST /v1/audio/transcriptions: speech to text. `transcribe` does the same for other modules.
Knows no stage.

Models answer silence and noise with invented words. So audio without speech has an empty
transcript, for which no request is submitted.
"""

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.errors import SHOWN_CHARS, BadInput, FleetError, UnsupportedValue
from fleet.core.ids import RequestId, new_request_id
from fleet.core.request import RequestSpec
from fleet.processing import AudioPart, Message, RecognitionOptions, Recording, TextPart
from fleet.processing.base import AudioSource
from fleet.processing.speech_presence import has_speech
from web.gateway.answer import AnswerStream, HeardPiece, TextPiece
from web.gateway.gateway import Gateway, PreparedChat
from web.gateway.stored_body import stored_body
from web.http.body import body_memory_of, read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.forms import open_form
from web.http.json_response import json_response
from web.http.middleware import request_id_of
from web.http.offload import prepare_in_thread
from web.http.sse import event, send_stream
from web.schema.audio import TranscriptionForm, ignored_of, parse_transcription
from web.schema.chat import ChatOptions
from web.schema.fields.common import ONE_FILE

UNKNOWN_LANGUAGE = "unknown"


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int


class TranscriptionTokenUsage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tokens"
):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputDetails


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="duration"):
    seconds: float


TranscriptionUsage = TranscriptionTokenUsage | DurationUsage
"""Usage of a transcription: tokens of a model that answers with the transcript, otherwise the
duration of the audio.
"""


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    usage: TranscriptionUsage


class TranscriptionSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a `verbose_json` transcript. Always covers the whole clip, since the model gives
    no times within it.

    `tokens`, `avg_logprob` and `no_speech_prob` are not measured, but constants with which clients
    that filter by them keep the segment.
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


class VerboseTranscription(msgspec.Struct, frozen=True, kw_only=True):
    """Response in the format `verbose_json`. `language` is the language that the client sent.
    Units: seconds. Source: openai 3.54, `TranscriptionVerbose`.
    """

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
    usage: TranscriptionTokenUsage | UnsetType = UNSET


async def transcribe(gateway: Gateway, recording: Recording, language: str | None = None) -> str:
    """Return the transcript of a recording; "" if it holds no speech. If the caller is cancelled,
    the request is aborted.

    Raises: FleetError; BadInput if the audio is too short or too long.
    """
    chat = await _prepare(gateway, recording, new_request_id(), language=language)
    if not await _is_spoken(chat):
        return ""
    active = await gateway.submit_prepared(chat)
    async with active.answer as answer:
        return "".join([text async for text in _texts(answer)])


async def _prepare(
    gateway: Gateway,
    audio: AudioSource,
    request_id: RequestId,
    *,
    temperature: float | None = None,
    language: str | None = None,
) -> PreparedChat:
    """Prepare the request of a transcription: of the stage that recognises audio, if the graph has
    one, otherwise a chat. Without a `temperature`, sampling is greedy.

    Raises: the errors of `Gateway.prepare_chat`.
    """
    if (heard := gateway.edges.heard) is not None:
        part, options = AudioPart(data=audio, where="file"), ChatOptions(model=gateway.model)
        return await gateway.prepare_chat(
            options,
            (Message(role="user", content=(part,)),),
            request_id,
            stored=stored_body(options, ()),
            kind="transcription",
            where="file",
            outputs=(heard,),
            hearing=RecognitionOptions(language=language, temperature=temperature),
        )
    prompt = TextPart(text=gateway.frontend.transcription_prompt(language), where="prompt")
    messages = (Message(role="user", content=(AudioPart(data=audio, where="file"), prompt)),)
    options = ChatOptions(model=gateway.model, temperature=temperature or 0.0)
    stored = stored_body(options, (Message(role="user", content=prompt),))
    return await gateway.prepare_chat(options, messages, request_id, stored=stored, where="file")


async def _is_spoken(chat: PreparedChat) -> bool:
    (clip,) = chat.spec.audio
    samples = np.frombuffer(chat.blob or b"", np.float32)
    return await prepare_in_thread(False, has_speech, samples, clip.rate_hz)


class TranscriptionEndpoint:
    """`POST /v1/audio/transcriptions`. A raw ASGI app, so that a client disconnect cancels the
    work.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await read_body(request, self._gateway.config.limits.max_body_bytes)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise BadInput(
                "content-type: send a form, multipart/form-data, with the audio file as its "
                "field file"
            )
        async with open_form(request.headers, raw) as form:
            fields = [
                (name, value)
                for name, value in form.multi_items()
                if isinstance(value, str) and name != "file"
            ]
            form_fields = parse_transcription(fields)
            self._gateway.check_model(form_fields.model or self._gateway.model)
            file = await _file_of(form)
            body_memory_of(scope).reserve(len(file))  # a copy out of `raw`
        answer = self._answer(form_fields, file, scope, receive, send)
        del raw, file  # they may be large, and are not needed during the answer
        await until_disconnect(receive, answer)

    async def _answer(
        self,
        form_fields: TranscriptionForm,
        file: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        request_id = request_id_of(scope)
        chat = await _prepare(
            self._gateway,
            file,
            request_id,
            temperature=form_fields.temperature,
            language=form_fields.language,
        )
        del file
        body_memory_of(scope).free()
        headers = chat.headers(sorted(ignored_of(form_fields)))
        if not await _is_spoken(chat):
            transcript = Transcript(text="", spec=chat.spec, usage=self._usage_of_silence(chat))
            if form_fields.stream:
                await send_stream(send, headers, _done(transcript))
                return
            await _response(form_fields, transcript, headers)(scope, receive, send)
            return
        active = await self._gateway.submit_prepared(chat)
        async with active.answer as answer:
            if form_fields.stream:
                await send_stream(send, headers, _events(self._gateway, answer))
                return
            text = "".join([text async for text in _texts(answer)])
            usage = _usage(self._gateway, answer)
            transcript = Transcript(text=text, spec=chat.spec, usage=usage)
            await _response(form_fields, transcript, headers)(scope, receive, send)

    def _usage_of_silence(self, chat: PreparedChat) -> TranscriptionUsage:
        """Return the usage of a prompt that was not submitted, since its audio holds no speech."""
        if self._gateway.edges.heard is not None:
            return DurationUsage(seconds=duration_s(chat.spec))
        num_audio = self._gateway.frontend.num_prompt_audio_tokens(chat.spec)
        return _token_usage(len(chat.spec.prompt_ids), num_audio, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    text: str
    spec: RequestSpec
    usage: TranscriptionUsage


def duration_s(spec: RequestSpec) -> float:
    """Return the duration of a request's audio in seconds."""
    return round(sum(clip.num_samples / clip.rate_hz for clip in spec.audio), 3)


def _response(
    form_fields: TranscriptionForm, transcript: Transcript, headers: dict[str, str]
) -> Response:
    if form_fields.response_format == "text":
        return PlainTextResponse(transcript.text, headers=headers)
    body: msgspec.Struct = Transcription(text=transcript.text, usage=transcript.usage)
    if form_fields.response_format == "verbose_json":
        body = _verbose(form_fields, transcript)
    return json_response(body, headers=headers)


def _verbose(form_fields: TranscriptionForm, transcript: Transcript) -> VerboseTranscription:
    text, seconds = transcript.text, duration_s(transcript.spec)
    raw = text.encode()
    segment = TranscriptionSegment(
        end=seconds,
        text=text,
        temperature=form_fields.temperature or 0.0,
        compression_ratio=round(len(raw) / len(zlib.compress(raw)), 3),
    )
    return VerboseTranscription(
        language=form_fields.language or UNKNOWN_LANGUAGE,
        duration=seconds,
        text=text,
        segments=[segment] if text else [],
        usage=DurationUsage(seconds=seconds),
    )


async def _file_of(form: FormData) -> bytes:
    """Return the content of the form's uploaded file. Raises: BadInput, UnsupportedValue naming the
    field.
    """
    file, *further = form.getlist("file") or [None]
    if isinstance(file, str) and not further:
        raise BadInput("file: send the audio as a file, not as text", param="file")
    others = [
        name
        for name, value in form.multi_items()
        if name != "file" and isinstance(value, UploadFile) and value.size
    ]
    if further or (file is not None and others):
        field = "file" if further else others[0][:SHOWN_CHARS]
        raise UnsupportedValue(f"{field}: {ONE_FILE}", param=field)
    if not isinstance(file, UploadFile):
        raise BadInput("file: this field is required", param="file")
    return await file.read()


async def _texts(answer: AnswerStream) -> AsyncIterator[str]:
    async for piece in answer.pieces():
        if isinstance(piece, TextPiece | HeardPiece) and piece.text:
            yield piece.text


async def _events(gateway: Gateway, answer: AnswerStream) -> AsyncIterator[bytes]:
    texts: list[str] = []
    try:
        async for text in _texts(answer):
            texts.append(text)
            yield event(TranscriptTextDelta(delta=text))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    yield event(_done_event("".join(texts), _usage(gateway, answer)))


async def _done(transcript: Transcript) -> AsyncIterator[bytes]:
    yield event(_done_event(transcript.text, transcript.usage))


def _done_event(text: str, usage: TranscriptionUsage) -> TranscriptTextDone:
    """Return the last event of a stream, which has token counts or no usage."""
    return TranscriptTextDone(
        text=text, usage=usage if isinstance(usage, TranscriptionTokenUsage) else UNSET
    )


def _usage(gateway: Gateway, answer: AnswerStream) -> TranscriptionUsage:
    if gateway.edges.heard is not None:
        return DurationUsage(seconds=duration_s(answer.spec))
    usage = answer.usage()
    audio_tokens = usage.prompt_tokens_details.audio_tokens
    return _token_usage(usage.prompt_tokens, audio_tokens, usage.completion_tokens)


def _token_usage(num_prompt: int, num_audio: int, num_answer: int) -> TranscriptionTokenUsage:
    return TranscriptionTokenUsage(
        input_tokens=num_prompt,
        output_tokens=num_answer,
        total_tokens=num_prompt + num_answer,
        input_token_details=InputDetails(
            text_tokens=num_prompt - num_audio, audio_tokens=num_audio
        ),
    )
