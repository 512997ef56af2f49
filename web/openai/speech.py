"""POST /v1/audio/speech: text to speech, streamed, in any of OpenAI's formats.

The text is passed to a stage that speaks texts, if the graph has one; otherwise to the model as the
answer of a chat request, and the model only speaks it. A long text is split into pieces, with one
request after another, where the frontend asks for it. Knows no stage.
"""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import BadInput, FleetError, InputTooLarge, UnsupportedValue
from fleet.core.ids import RequestId
from fleet.processing import TextPart
from web.gateway.answer import BYTES_PER_SAMPLE, AudioPiece
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import ActiveRequest
from web.gateway.speech_requests import SpeechRequests
from web.gateway.word_times import WordTime, WordTimes
from web.http.body import read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.middleware import request_id_of
from web.http.offload import INLINE_BYTES, parse_body, prepare_in_thread
from web.http.sse import event, send_stream
from web.openai.audio_encoder import MEDIA_TYPES, open_encoder
from web.schema.audio import SpeechBody, parse_speech
from web.schema.fields.audio import SPEECH

log = logging.getLogger("fleet.web")


class SpeechUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a speech request. `output_tokens` counts audio tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Event with the next bytes of the audio file. `audio` is base64. `timestamps`, if asked for:
    the words that end in this audio; their times count from the beginning of the file.
    """

    type: Literal["speech.audio.delta"] = "speech.audio.delta"
    audio: str
    timestamps: list[WordTime] | msgspec.UnsetType = msgspec.UNSET


class SpeechDone(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of a speech stream. `timestamps`: words after the last audio, which are not
    spoken; absent if there are no such words, or if the client did not ask for word times.
    """

    type: Literal["speech.audio.done"] = "speech.audio.done"
    usage: SpeechUsage
    timestamps: list[WordTime] | msgspec.UnsetType = msgspec.UNSET


class SpeechStream:
    """The audio of one text, which may be spoken in several pieces. Closing the stack `answer`
    aborts the request of the current piece.
    """

    def __init__(
        self, gateway: Gateway, body: SpeechBody, pieces: list[str], answer: AsyncExitStack
    ) -> None:
        self._gateway = gateway
        self._pieces = pieces
        self._answer = answer
        speed = 1.0 if body.speed is None else body.speed
        # A stage that speaks texts slows its speech by the durations of its sounds. The speech of
        # other graphs is stretched here.
        self.tempo = 1.0 if gateway.speaks_texts else speed
        """Factor by which the encoder speeds up the audio; 1 if the voice itself changes its pace.
        """
        self._requests = SpeechRequests(
            gateway,
            body.chat_options(body.model),
            speed if gateway.speaks_texts else 1.0,
            answer,
        )
        self._num_input, self._num_output = 0, 0
        self._words: list[WordTime] | None = [] if body.word_timestamps else None

    async def begin(self, request_id: RequestId) -> ActiveRequest:
        """Submit the request of the first piece. Raises: the errors of `Gateway.prepare_chat`."""
        return await self._requests.submit(self._pieces[0], request_id)

    async def audio(self, first: ActiveRequest) -> AsyncIterator[bytes]:
        """Yield PCM16 of all pieces. `first` is the request that `begin` returned.

        Raises: FleetError if the request of a piece fails.
        """
        num_samples = 0
        for number, text in enumerate(self._pieces):
            active = await self._requests.submit_next(text) if number else first
            words = WordTimes(text, self._gateway.frontend.sample_rate_hz, num_samples)
            async for piece in active.answer.pieces():
                if isinstance(piece, AudioPiece):
                    self._add_words(words, active)
                    num_samples += len(piece.pcm) // BYTES_PER_SAMPLE
                    yield piece.pcm
            self._add_words(words, active)
            usage = active.answer.usage()
            self._num_input += usage.prompt_tokens
            self._num_output += usage.completion_tokens_details.audio_tokens
            await self._answer.aclose()

    def _add_words(self, words: WordTimes, active: ActiveRequest) -> None:
        if self._words is not None:
            self._words += words.take(active.answer.word_ends or ())

    def take_words(self) -> list[WordTime] | msgspec.UnsetType:
        """Return the words that ended in the audio since the last call; UNSET if the client did not
        ask for word times.
        """
        if self._words is None:
            return msgspec.UNSET
        taken, self._words = self._words, []
        return taken

    def usage(self) -> SpeechUsage:
        return SpeechUsage(
            input_tokens=self._num_input,
            output_tokens=self._num_output,
            total_tokens=self._num_input + self._num_output,
        )


class SpeechEndpoint:
    """`POST /v1/audio/speech`. A raw ASGI app, so that a client disconnect cancels the work."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(Request(scope, receive), self._gateway.config.limits.max_body_bytes)
        body = await parse_body(parse_speech, raw)
        self._gateway.check_model(body.model)
        self._gateway.check_word_times(asked=bool(body.word_timestamps))
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
            audio = base64.b64encode(data).decode("ascii")
            yield event(SpeechDelta(audio=audio, timestamps=speech.take_words()))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    words = speech.take_words()
    yield event(SpeechDone(usage=speech.usage(), timestamps=words or msgspec.UNSET))
