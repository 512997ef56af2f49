"""The console's socket: questions come as JSON, text goes out as JSON and sound as binary PCM16.

The body of an `ask` is that of POST /v1/chat/completions, checked by the same code. Knows no page and no stage.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from fleet.core.errors import BadInput, FleetError
from fleet.core.ids import RequestId, new_request_id
from web.answer import BYTES_PER_SAMPLE, Answer, AudioPiece, Position, rest_of
from web.errors import ErrorBody, NotFound, envelope_of
from web.gateway import Gateway
from web.schema import parse_chat

log = logging.getLogger("fleet.web")


class Ask(msgspec.Struct, frozen=True, tag_field="type", tag="ask"):
    body: msgspec.Raw


class Resume(msgspec.Struct, frozen=True, tag_field="type", tag="resume"):
    """Go on with an answer that another socket began: what the page has of it already."""

    request_id: str
    chars: int
    samples: int


class Stop(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    pass


class Played(msgspec.Struct, frozen=True, tag_field="type", tag="played"):
    """What the page heard since it last said so."""

    samples: int
    underruns: int


class Started(msgspec.Struct, frozen=True, tag_field="type", tag="started", kw_only=True):
    """Sound that comes before this belongs to an answer that was stopped."""

    request_id: str
    seed: int
    voice: str | None


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class End(msgspec.Struct, frozen=True, tag_field="type", tag="end", kw_only=True):
    finish_reason: str
    num_samples: int
    text_tokens: int


class Stopped(msgspec.Struct, frozen=True, tag_field="type", tag="stopped"):
    pass


class Failed(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorBody


FromPage = Ask | Resume | Stop | Played
ToPage = Started | Text | End | Stopped | Failed
_decoder = msgspec.json.Decoder(FromPage)
_encode = msgspec.json.Encoder().encode


class ConsoleSocket:
    """One page's socket; at most one answer under way. A page that closes takes its answer with it."""

    def __init__(self, gateway: Gateway, websocket: WebSocket, on_started: Callable[[RequestId], None]) -> None:
        self._gateway = gateway
        self._websocket = websocket
        self._on_started = on_started
        self._turn: asyncio.Task[None] | None = None

    async def run(self) -> None:
        await self._websocket.accept()
        try:
            while (message := await self._websocket.receive())["type"] == "websocket.receive":
                await self._handle(message.get("text") or "")
        except WebSocketDisconnect:
            log.debug("a console page closed while it was written to")
        finally:
            await self._stop()

    async def _handle(self, raw: str) -> None:
        try:
            message = _decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            await self._send(Failed(envelope_of(BadInput(f"the console's message cannot be read: {error}")).error))
            return
        if isinstance(message, Ask):
            await self._stop()
            self._turn = asyncio.create_task(self._guarded(self._answer(bytes(message.body))))
        elif isinstance(message, Resume):
            await self._stop()
            self._turn = asyncio.create_task(self._guarded(self._resume(message)))
        elif isinstance(message, Stop):
            await self._stop()
            await self._send(Stopped())
        else:
            self._gateway.metrics.underruns.inc(max(0, min(message.underruns, 1000)))

    async def _stop(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.cancel()
            await asyncio.wait({turn})

    async def _guarded(self, turn: Coroutine[None, None, None]) -> None:
        try:
            await turn
        except FleetError as error:
            await self._send(Failed(envelope_of(error).error))
        except WebSocketDisconnect:
            log.debug("a console page left during its answer")
        except Exception:
            # The loop of this connection: the story goes to the log, only this answer fails.
            log.exception("a console answer failed")
            await self._send(Failed(ErrorBody(message="the server failed; its log tells why", type="server_error")))

    async def _resume(self, resume: Resume) -> None:
        answer = await self._gateway.resume(RequestId(resume.request_id))
        if answer is None:
            raise NotFound(f"no request {resume.request_id!r}; ask again", param="request_id")
        async with answer:
            self._on_started(answer.spec.id)
            await self._deliver(answer, Position(max(0, resume.chars), max(0, resume.samples) * BYTES_PER_SAMPLE))

    async def _answer(self, raw: bytes) -> None:
        opened = await self._gateway.open(parse_chat(raw), new_request_id())
        async with opened.answer as answer:
            request_id = answer.spec.id
            self._on_started(request_id)
            await self._send(Started(request_id=request_id, seed=opened.seed, voice=opened.voice))
            await self._deliver(answer, Position())

    async def _deliver(self, answer: Answer, sent: Position) -> None:
        async for piece in rest_of(answer.pieces(), sent):
            if isinstance(piece, AudioPiece):
                await self._websocket.send_bytes(piece.pcm)
            else:
                await self._send(Text(piece.text))
        tokens = answer.usage().completion_tokens_details.text_tokens
        await self._send(
            End(finish_reason=answer.finish_reason, num_samples=answer.num_samples, text_tokens=tokens)
        )

    async def _send(self, message: ToPage) -> None:
        await self._websocket.send_text(_encode(message).decode())
