"""POST /v1/audio/speech: text to speech, streamed, in any of OpenAI's formats.

The text is passed to a stage that speaks texts, if the graph has one; otherwise to the model as the
answer of a chat request, and the model only speaks it. A long text is split into pieces, with one
request after another, where the frontend asks for it. Knows no stage.
"""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import BadInput, FleetError, InputTooLarge, Overloaded, UnsupportedValue
from fleet.core.ids import RequestId, new_request_id
from fleet.processing import Message, TextPart
from web.gateway.answer import AudioPiece
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import ActiveRequest
from web.http.body import read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.middleware import request_id_of
from web.http.offload import INLINE_BYTES, parse_body, prepare_in_thread
from web.http.sse import event, send_stream
from web.openai.audio_encoder import MEDIA_TYPES, open_encoder
from web.schema.audio import SpeechBody, parse_speech
from web.schema.chat import AudioOptions, ChatOptions, voice_name
from web.schema.fields.audio import SPEECH

log = logging.getLogger("fleet.web")

RETRY_S = 0.25
PATIENCE_S = 30.0
"""Time in seconds for which a further piece of a text is submitted again while it is refused."""


class SpeechUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a speech request. `output_tokens` counts audio tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Event with the next bytes of the audio file. `audio` is base64."""

    type: Literal["speech.audio.delta"] = "speech.audio.delta"
    audio: str


class SpeechDone(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["speech.audio.done"] = "speech.audio.done"
    usage: SpeechUsage


class SpeechStream:
    """The audio of one text, which may be spoken in several pieces. Closing the stack `answer`
    aborts the request of the current piece.

    Each piece is a request of its own, submitted when the audio of the previous piece is complete:
    at that time the client still has much audio to play.
    """

    def __init__(
        self, gateway: Gateway, body: SpeechBody, pieces: list[str], answer: AsyncExitStack
    ) -> None:
        self._gateway = gateway
        self._pieces = pieces
        self._answer = answer
        self._options = ChatOptions(
            model=body.model,
            modalities=["audio"],
            audio=AudioOptions(voice=voice_name(body.voice)),
            temperature=body.temperature,
            seed=body.seed,
            fleet=body.fleet,
        )
        speed = 1.0 if body.speed is None else body.speed
        # A stage that speaks texts slows its speech by the durations of its sounds. The speech of
        # other graphs is stretched here.
        self._speed = speed if gateway.speaks_texts else 1.0
        self.tempo = 1.0 if gateway.speaks_texts else speed
        """Factor by which the audio is still to be sped up."""
        self._arrived_s = time.monotonic()
        self._num_input, self._num_output = 0, 0

    async def begin(self, request_id: RequestId) -> ActiveRequest:
        """Submit the request of the first piece. Raises: the errors of `Gateway.prepare_chat`."""
        return await self._submit(self._pieces[0], request_id)

    async def audio(self, first: ActiveRequest) -> AsyncIterator[bytes]:
        """Yield PCM16 of all pieces. `first` is the request that `begin` returned.

        Raises: FleetError if the request of a piece fails.
        """
        for number, text in enumerate(self._pieces):
            active = await self._submit_with_retries(text) if number else first
            async for piece in active.answer.pieces():
                if isinstance(piece, AudioPiece):
                    yield piece.pcm
            usage = active.answer.usage()
            self._num_input += usage.prompt_tokens
            self._num_output += usage.completion_tokens_details.audio_tokens
            await self._answer.aclose()

    def usage(self) -> SpeechUsage:
        return SpeechUsage(
            input_tokens=self._num_input,
            output_tokens=self._num_output,
            total_tokens=self._num_input + self._num_output,
        )

    async def _submit_with_retries(self, piece: str) -> ActiveRequest:
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self._submit(piece, new_request_id(), continues=True)
            except Overloaded:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _submit(
        self, piece: str, request_id: RequestId, *, continues: bool = False
    ) -> ActiveRequest:
        """Submit the request of a piece. If it `continues` an earlier piece, its leading silence is
        not trimmed.
        """
        gateway, text = self._gateway, TextPart(text=piece, where="input")
        prompt = TextPart(text=gateway.frontend.speech_prompt(piece), where="input")
        is_text, audio = gateway.speaks_texts, gateway.edges.audio
        chat = await gateway.prepare_chat(
            self._options,
            () if is_text else (Message(role="user", content=prompt),),
            request_id,
            given=() if is_text else text,
            speech_text=text if is_text else None,
            outputs=(audio,) if is_text and audio is not None else None,
            where="input",
            voice_where="voice",
            continues=continues,
            arrived_s=self._arrived_s,
        )
        active = await self._gateway.submit_prepared(chat.at_speed(self._speed))
        await self._answer.enter_async_context(active.answer)
        return active


class SpeechEndpoint:
    """`POST /v1/audio/speech`. A raw ASGI app, so that a client disconnect cancels the work."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(Request(scope, receive), self._gateway.config.limits.max_body_bytes)
        body = await parse_body(parse_speech, raw)
        self._gateway.check_model(body.model)
        pieces = await prepare_in_thread(len(body.input) > INLINE_BYTES, self._pieces, body.input)
        await until_disconnect(receive, self._answer(body, pieces, scope, send))

    def _pieces(self, text: str) -> list[str]:
        """Check the text and split it into pieces, each short enough for one request.

        Raises: BadInput, InputTooLarge naming the field.
        """
        limits = self._gateway.config.limits
        if not self._gateway.speaks:
            raise UnsupportedValue("model: this model does not speak", param="model")
        if len(text) > limits.max_speech_chars:
            raise InputTooLarge(
                f"input: {len(text)} characters; at most {limits.max_speech_chars} are allowed",
                param="input",
            )
        max_tokens = min(limits.speech_piece_tokens, limits.max_answer_tokens)
        pieces = self._gateway.frontend.speech_pieces(
            TextPart(text=text, where="input"), max_tokens
        )
        if not pieces:
            raise BadInput("input: holds nothing that this model can say", param="input")
        return pieces

    async def _answer(self, body: SpeechBody, pieces: list[str], scope: Scope, send: Send) -> None:
        async with AsyncExitStack() as answer:
            speech = SpeechStream(self._gateway, body, pieces, answer)
            active = await speech.begin(request_id_of(scope))
            headers = active.chat.headers(sorted(given.where for given in SPEECH.ignored(body)))
            file = self._file(speech.audio(active), body, speech.tempo)
            if body.stream_format == "sse":
                await send_stream(send, headers, _events(speech, file))
            else:
                await _send_file(
                    send, {**headers, "content-type": MEDIA_TYPES[body.file_format]}, file
                )

    async def _file(
        self, audio: AsyncIterator[bytes], body: SpeechBody, tempo: float
    ) -> AsyncIterator[bytes]:
        """Encode PCM16 pieces in the requested format and tempo; yield the file in non-empty
        pieces.
        """
        encoder = open_encoder(body.file_format, self._gateway.frontend.sample_rate_hz, tempo)
        async for pcm in audio:
            # encoding takes a hundredth of the duration of the speech: other streams of this
            # process must not wait for it
            if data := await asyncio.to_thread(encoder.feed, pcm):
                yield data
        if data := await asyncio.to_thread(encoder.finish):
            yield data


async def _send_file(send: Send, headers: dict[str, str], file: AsyncIterator[bytes]) -> None:
    """Send an audio file as a streamed response. The response starts with the first audio, so that
    an earlier failure has its own status; a later failure truncates the file.
    """
    data = await anext(file, b"")
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    try:
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await anext(file, b"")
    except FleetError as error:
        log.warning("a speech response is truncated: %s", error.message)
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(speech: SpeechStream, file: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for data in file:
            yield event(SpeechDelta(audio=base64.b64encode(data).decode("ascii")))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    yield event(SpeechDone(usage=speech.usage()))
