"""POST /v1/audio/speech: speaks the given text itself, while it is made, in any of OpenAI's formats.

A text is an answer that is given and not drawn. A long one is spoken in pieces, one after another. Knows no stage.
"""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Literal, Self

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import BadInput, FleetError, InputTooLarge, Overloaded, UnsupportedValue
from fleet.core.ids import RequestId, new_request_id
from fleet.processing import Message, TextPart
from web.gateway.answer import AudioPiece
from web.gateway.gateway import ActiveRequest, Gateway, RequestOverrides
from web.http.body import read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.middleware import request_id_of
from web.http.offload import parse_body
from web.http.sse import event, send_stream
from web.openai.audio_encoder import MEDIA_TYPES, open_encoder
from web.schema.audio import SpeechBody, parse_speech
from web.schema.chat import AudioOptions, ChatBody, MessageBody, voice_name

log = logging.getLogger("fleet.web")

RETRY_S = 0.25
MAX_RETRIES = 120
"""A text half spoken waits this often for room in the queue."""


class SpeechUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`output_tokens` are those of sound."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, frozen=True, kw_only=True):
    """`audio` is base64 of the file's next bytes."""

    type: Literal["speech.audio.delta"] = "speech.audio.delta"
    audio: str


class SpeechDone(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["speech.audio.done"] = "speech.audio.done"
    usage: SpeechUsage


class Speech:
    """One text on its way to sound; use as an async context manager, which aborts what is under way when left before the end.

    Each piece is an answer of its own, begun when the one before is all there: the listener is far behind by then.
    """

    def __init__(self, gateway: Gateway, body: SpeechBody, pieces: list[str]) -> None:
        self._gateway, self._body, self._pieces = gateway, body, pieces
        self._held = AsyncExitStack()
        self._num_input, self._num_output = 0, 0
        self._opened: ActiveRequest | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._held.aclose()

    async def begin(self, request_id: RequestId) -> ActiveRequest:
        """Raises: whatever `Gateway.open` raises."""
        self._opened = await self._open(self._pieces[0], request_id)
        return self._opened

    async def sound(self) -> AsyncIterator[bytes]:
        """PCM16 of all pieces, after `begin`. Raises: FleetError if one fails."""
        opened = self._opened
        for following in [*self._pieces[1:], None]:
            assert opened is not None, "not begun"
            async for piece in opened.answer.pieces():
                if isinstance(piece, AudioPiece):
                    yield piece.pcm
            usage = opened.answer.usage()
            self._num_input += usage.prompt_tokens
            self._num_output += usage.completion_tokens_details.audio_tokens
            await self._held.aclose()
            opened = await self._open_when_there_is_room(following) if following is not None else None

    def usage(self) -> SpeechUsage:
        return SpeechUsage(
            input_tokens=self._num_input,
            output_tokens=self._num_output,
            total_tokens=self._num_input + self._num_output,
        )

    async def _open_when_there_is_room(self, piece: str) -> ActiveRequest:
        for _ in range(MAX_RETRIES):
            try:
                return await self._open(piece, new_request_id(), continues=True)
            except Overloaded:
                await asyncio.sleep(RETRY_S)
        return await self._open(piece, new_request_id(), continues=True)

    async def _open(self, piece: str, request_id: RequestId, *, continues: bool = False) -> ActiveRequest:
        """`continues`: it follows another piece, and the pause between them stays."""
        prompt = TextPart(text=self._gateway.frontend.speech_prompt(piece), where="input")
        asked = RequestOverrides(
            messages=(Message(role="user", content=prompt),),
            given=TextPart(text=piece, where="input"),
            where="input",
            voice_where="voice",
            continues=continues,
        )
        opened = await self._gateway.open(_as_chat(self._body, prompt.text), request_id, asked)
        await self._held.enter_async_context(opened.answer)
        return opened


class SpeechEndpoint:
    """An ASGI app and not a function: work stops the moment the client leaves."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(Request(scope, receive), self._gateway.config.limits.max_body_bytes)
        body = await parse_body(parse_speech, raw)
        self._gateway.check_model(body.model)
        pieces = await asyncio.to_thread(self._pieces, body.input)
        await until_disconnect(receive, self._answer(Speech(self._gateway, body, pieces), body, scope, send))

    def _pieces(self, text: str) -> list[str]:
        """Raises: BadInput, InputTooLarge naming the field."""
        limits = self._gateway.config.limits
        if not self._gateway.speaks:
            raise UnsupportedValue("model: this model does not speak", param="model")
        if len(text) > limits.max_speech_chars:
            raise InputTooLarge(f"input: {len(text)} characters; at most {limits.max_speech_chars} are allowed", param="input")
        max_tokens = min(limits.speech_piece_tokens, limits.max_answer_tokens)
        pieces = self._gateway.frontend.speech_pieces(TextPart(text=text, where="input"), max_tokens)
        if not pieces:
            raise BadInput("input: holds nothing that this model can say", param="input")
        return pieces

    async def _answer(self, speech: Speech, body: SpeechBody, scope: Scope, send: Send) -> None:
        async with speech:
            opened = await speech.begin(request_id_of(scope))
            headers = opened.headers(body.ignored())
            file = self._file(speech, body)
            if body.stream_format == "sse":
                await send_stream(send, headers, _events(speech, file))
            else:
                await _send_file(send, {**headers, "content-type": MEDIA_TYPES[body.file_format]}, file)

    async def _file(self, speech: Speech, body: SpeechBody) -> AsyncIterator[bytes]:
        """The file as it is made, no empty pieces."""
        encoder = open_encoder(body.file_format, self._gateway.frontend.sample_rate_hz, body.speed or 1.0)
        async for pcm in speech.sound():
            # codecs take a hundredth of the time of speech, which other streams of this process need not wait for
            if made := await asyncio.to_thread(encoder.feed, pcm):
                yield made
        if made := await asyncio.to_thread(encoder.finish):
            yield made


async def _send_file(send: Send, headers: dict[str, str], file: AsyncIterator[bytes]) -> None:
    """Nothing is sent before the first sound, so that what fails before has its status. What fails later cuts the file short,
    which the client can tell from the connection.
    """
    made = await anext(file, b"")
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    try:
        while made:
            await send({"type": "http.response.body", "body": made, "more_body": True})
            made = await anext(file, b"")
    except FleetError as error:
        log.warning("a speech is cut short: %s", error.message)
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(speech: Speech, file: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for made in file:
            yield event(SpeechDelta(audio=base64.b64encode(made).decode("ascii")))
    except FleetError as error:
        yield event(envelope_of(error))
        return
    yield event(SpeechDone(usage=speech.usage()))


def _as_chat(body: SpeechBody, prompt: str) -> ChatBody:
    """What sampling and voice are resolved from."""
    return ChatBody(
        model=body.model,
        messages=[MessageBody(role="user", content=prompt)],
        modalities=["audio"],
        audio=AudioOptions(voice=voice_name(body.voice)),
        temperature=body.temperature,
        seed=body.seed,
        fleet=body.fleet,
    )
