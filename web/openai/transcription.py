"""POST /v1/audio/transcriptions: speech to text. Knows no stage."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import SHOWN_CHARS, BadInput, FleetError, InputTooLarge, UnsupportedValue
from fleet.processing import RecognitionOptions
from web.gateway.answer import AnswerStream, HeardPiece
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import PreparedChat
from web.http.body import body_memory_of, read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.forms import open_form
from web.http.middleware import request_id_of
from web.http.sse import event, send_stream
from web.openai.long_transcription import LongTranscription, spool_recording
from web.openai.recognition import (
    duration_s,
    is_spoken,
    prepare_transcription,
    reports_of,
    text_of,
    texts_of,
)
from web.openai.transcript_formats import (
    DurationUsage,
    InputDetails,
    Transcript,
    TranscriptionTokenUsage,
    TranscriptionUsage,
    response_of,
)
from web.schema.audio import TranscriptionForm, ignored_of, parse_transcription
from web.schema.fields.common import ONE_FILE


class TranscriptTextDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TranscriptTextDone(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TranscriptionTokenUsage | UnsetType = UNSET


class Reply(NamedTuple):
    """The ASGI arguments of a request whose answer is being sent."""

    scope: Scope
    receive: Receive
    send: Send


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
            form_fields = parse_transcription(
                fields, has_times=self._gateway.edges.heard is not None
            )
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
        hearing = RecognitionOptions(
            language=form_fields.language,
            temperature=form_fields.temperature,
            prompt=form_fields.prompt or "",
            times=form_fields.needs_times and self._gateway.edges.heard is not None,
        )
        try:
            chat = await prepare_transcription(self._gateway, file, request_id_of(scope), hearing)
        except InputTooLarge as error:
            if error.param != "file" or self._gateway.edges.heard is None:
                raise
            recording = await spool_recording(self._gateway, file)
            del file
            body_memory_of(scope).free()
            long = LongTranscription(self._gateway, recording, hearing)
            await self._send_long(form_fields, long, Reply(scope, receive, send))
            return
        del file
        body_memory_of(scope).free()
        headers = chat.headers(sorted(ignored_of(form_fields)))
        if not await is_spoken(chat):
            usage = self._usage_of_silence(chat)
            silent = Transcript(
                text="",
                seconds=duration_s(chat.spec),
                usage=usage,
                reports=() if hearing.times else None,
            )
            if form_fields.stream:
                await send_stream(send, headers, _done(silent))
                return
            await response_of(form_fields, silent, headers)(scope, receive, send)
            return
        active = await self._gateway.submit_prepared(chat)
        async with active.answer as answer:
            if form_fields.stream:
                await send_stream(send, headers, _events(self._gateway, answer))
                return
            pieces = [piece async for piece in answer.pieces()]
            transcript = Transcript(
                text="".join(text_of(piece) for piece in pieces),
                seconds=duration_s(chat.spec),
                usage=_usage(self._gateway, answer),
                reports=reports_of(pieces) if hearing.times else None,
            )
            await response_of(form_fields, transcript, headers)(scope, receive, send)

    async def _send_long(
        self, form_fields: TranscriptionForm, long: LongTranscription, reply: Reply
    ) -> None:
        """Send the transcript of a recording that one request cannot hold."""
        ignored = sorted(ignored_of(form_fields))
        headers = {"x-fleet-ignored": ", ".join(ignored)} if ignored else {}
        usage = DurationUsage(seconds=long.seconds)
        async with aclosing(long.pieces()) as pieces:
            if form_fields.stream:
                await send_stream(reply.send, headers, _long_events(pieces, usage))
                return
            heard = [piece async for piece in pieces]
        transcript = Transcript(
            text="".join(piece.text for piece in heard),
            seconds=long.seconds,
            usage=usage,
            reports=[report for piece in heard for report in piece.reports],
        )
        await response_of(form_fields, transcript, headers)(reply.scope, reply.receive, reply.send)

    def _usage_of_silence(self, chat: PreparedChat) -> TranscriptionUsage:
        """Return the usage of a prompt that was not submitted, since its audio holds no speech."""
        if self._gateway.edges.heard is not None:
            return DurationUsage(seconds=duration_s(chat.spec))
        num_audio = self._gateway.frontend.num_prompt_audio_tokens(chat.spec)
        return _token_usage(len(chat.spec.prompt_ids), num_audio, 0)


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


async def _long_events(
    pieces: AsyncIterator[HeardPiece], usage: TranscriptionUsage
) -> AsyncIterator[bytes]:
    texts: list[str] = []
    try:
        async for piece in pieces:
            if piece.text:
                texts.append(piece.text)
                yield event(TranscriptTextDelta(delta=piece.text))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    yield event(_done_event("".join(texts), usage))


async def _events(gateway: Gateway, answer: AnswerStream) -> AsyncIterator[bytes]:
    texts: list[str] = []
    try:
        async for text in texts_of(answer):
            texts.append(text)
            yield event(TranscriptTextDelta(delta=text))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    yield event(_done_event("".join(texts), _usage(gateway, answer)))


async def _done(transcript: Transcript) -> AsyncIterator[bytes]:
    yield event(_done_event(transcript.text, transcript.usage))


def _done_event(text: str, usage: TranscriptionUsage) -> TranscriptTextDone:
    """Return the last event of a stream, with the usage if it counts tokens; a duration is left
    out, since the event has no field for durations.
    """
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
