"""WS /v1/audio/speech/stream: a text is spoken while it arrives, in vllm-omni's protocol.

A client configures the session, sends a text in pieces, and gets the audio of each clause as soon
as the clause is complete. Several texts may follow one another. Closing the socket ends the request
of the clause that is being spoken. Knows no stage.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from fleet.core.errors import BadInput, FleetError, InputTooLarge, UnsupportedValue
from web.gateway.gateway import Gateway
from web.http.errors import SessionIdle, UpgradeRequired, refusal_response
from web.http.offload import parse_body
from web.realtime.transport.refusal import accept, clipped_reason, close_code, close_reason
from web.schema.chat import voice_name
from web.speech_stream.client_events import (
    InputDone,
    InputTextEvent,
    SessionConfig,
    SpeechEvent,
    parse_event,
)
from web.speech_stream.utterance import GrowingUtterance, ServerEvent, speech_error

log = logging.getLogger("fleet.web")

PATH = "/v1/audio/speech/stream"
MAX_EVENT_BYTES = 128 * 1024
MAX_WAITING_CHARS = 64 * 1024
"""Limit of a session's text that waits to be spoken, in characters: about an hour of speech."""
UTTERANCE_CHARS = 128
"""Number of characters that each waiting utterance counts in addition to its text."""
NORMAL_CLOSURE = 1000
_encode = msgspec.json.Encoder().encode


class SpeechSockets:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[BaseRoute]:
        return [
            WebSocketRoute(PATH, self.serve),
            Route(PATH, self.no_socket, methods=["GET"]),
        ]

    async def serve(self, websocket: WebSocket) -> None:
        await accept(websocket)
        await SpeechSocket(self._gateway, websocket).run()

    async def no_socket(self, _request: Request) -> Response:
        error = UpgradeRequired("this is a WebSocket: connect with ws:// or wss://")
        return refusal_response(error, {"upgrade": "websocket"})


class SpeechSocket:
    """A client's connection. Its utterances are spoken in their order."""

    def __init__(self, gateway: Gateway, websocket: WebSocket) -> None:
        self._gateway = gateway
        self._websocket = websocket
        self._config: SessionConfig | None = None
        self._open: GrowingUtterance | None = None
        """Utterance whose text is not complete; None between two utterances."""
        self._num_utterances = 0
        self._waiting: asyncio.Queue[GrowingUtterance | None] = asyncio.Queue()
        """Utterances to speak; None ends the session."""
        self._unspoken: list[GrowingUtterance] = []

    async def run(self) -> None:
        """Serve the client until it disconnects, or until the session is over."""
        speaking = asyncio.create_task(self._speak())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({speaking, reading}, return_when=asyncio.FIRST_COMPLETED)
            for task in (speaking, reading):
                if task.done():
                    await task
            if not reading.done():
                await self._close(NORMAL_CLOSURE)
        except FleetError as error:
            await self._refuse(error)
        except ClientDisconnect:
            log.debug("the client of a speech socket disconnected while it was sent audio")
        finally:
            speaking.cancel()
            reading.cancel()
            await asyncio.wait({speaking, reading})

    async def _speak(self) -> None:
        while (utterance := await self._waiting.get()) is not None:
            await utterance.speak(self._send)
            self._unspoken.remove(utterance)

    async def _read(self) -> None:
        """Read events until the client disconnects. Raises: FleetError that ends the session."""
        while (frame := await self._next_frame()) is not None:
            try:
                self._handle(await parse_body(parse_event, frame))
            except InputTooLarge:
                raise
            except FleetError as error:
                if self._config is None:
                    raise
                await self._send(speech_error(error))
            # Frames that have arrived are read without a pause, so let other tasks run.
            await asyncio.sleep(0)

    async def _next_frame(self) -> bytes | None:
        """Return the next frame; None after the disconnect. Raises: BadInput, InputTooLarge;
        SessionIdle if the client sends nothing although its text is incomplete or nothing is being
        spoken.
        """
        idle_s = self._gateway.config.voice.idle_s
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    message = await self._websocket.receive()
                break
            except TimeoutError:
                if not self._unspoken or self._open is not None:
                    raise SessionIdle(
                        f"nothing was sent for {idle_s:g} s (voice.idle_s); connect again"
                    ) from None
        if message["type"] == "websocket.disconnect":
            return None
        text = message.get("text")
        if text is None:
            raise BadInput("binary frames are not read here; send events as text")
        if len(frame := text.encode()) > MAX_EVENT_BYTES:
            raise InputTooLarge(f"an event has at most {MAX_EVENT_BYTES} bytes", param="text")
        return frame

    def _handle(self, event: SpeechEvent) -> None:
        if isinstance(event, SessionConfig):
            self._configure(event)
            return
        if self._config is None:
            raise BadInput(f"{event.type}: send session.config first", param="type")
        if isinstance(event, InputTextEvent):
            if event.text:
                self._utterance(self._config).text.add(event.text)
            self._check_waiting()
        elif isinstance(event, InputDone):
            self._utterance(self._config).text.finish()
            self._open = None
            self._check_waiting()
        else:
            if self._open is not None:
                self._open.text.finish()
                self._open = None
            self._waiting.put_nowait(None)

    def _configure(self, config: SessionConfig) -> None:
        """Set the configuration of the next utterances. Raises: BadInput, ModelNotFound,
        UnsupportedValue naming the field.
        """
        if self._open is not None:
            raise BadInput(
                "session.config: a text is being spoken; send input.done first", param="type"
            )
        gateway = self._gateway
        gateway.check_model(config.model or gateway.model)
        if not gateway.speaks:
            raise UnsupportedValue("model: this model does not speak", param="model")
        if not gateway.speaks_texts:
            raise UnsupportedValue(
                "model: this model speaks a text as one answer, whose voice depends on all of it; "
                "send the whole text to POST /v1/audio/speech",
                param="model",
            )
        gateway.check_word_times(asked=bool(config.word_timestamps))
        gateway.frontend.voice(voice_name(config.voice), "voice")
        self._config = config

    def _utterance(self, config: SessionConfig) -> GrowingUtterance:
        if self._open is None:
            self._open = GrowingUtterance(self._gateway, config, self._num_utterances)
            self._num_utterances += 1
            self._unspoken.append(self._open)
            self._waiting.put_nowait(self._open)
        return self._open

    def _check_waiting(self) -> None:
        num_chars = sum(UTTERANCE_CHARS + each.text.num_waiting for each in self._unspoken)
        if num_chars > MAX_WAITING_CHARS:
            raise InputTooLarge(
                f"text: more than {MAX_WAITING_CHARS} characters wait to be spoken; send a text at "
                "the pace of its speech",
                param="text",
            )

    async def _send(self, event: ServerEvent | bytes) -> None:
        """Send an event or a binary frame. Raises: ClientDisconnect."""
        with _disconnecting():
            if isinstance(event, bytes):
                await self._websocket.send_bytes(event)
            else:
                await self._websocket.send_text(_encode(event).decode())

    async def _refuse(self, error: FleetError) -> None:
        with contextlib.suppress(ClientDisconnect):
            await self._send(speech_error(error))
            await self._close(close_code(error), clipped_reason(close_reason(error)))

    async def _close(self, code: int, reason: str = "") -> None:
        with _disconnecting():
            await self._websocket.close(code, reason)


@contextlib.contextmanager
def _disconnecting() -> Iterator[None]:
    """Raise ClientDisconnect in place of the exceptions with which Starlette reports a disconnect;
    once Starlette has received the disconnect, the exception is RuntimeError.
    """
    try:
        yield
    except (WebSocketDisconnect, RuntimeError) as gone:
        raise ClientDisconnect from gone
