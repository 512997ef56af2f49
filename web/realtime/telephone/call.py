"""A telephone call over Twilio's Media Streams, `WS /v1/telephone/twilio`: a voice session in
G.711, whose settings are the call's custom parameters.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from fleet.core.errors import BadInput, FleetError, UnsupportedValue
from web.gateway.gateway import Gateway
from web.http.callers import ANYONE, acting_as, caller_of
from web.http.errors import Unauthorized
from web.http.guard import CLIENT_SECRET_PREFIX, TELEPHONE_PATH
from web.http.key_ring import KeyRing
from web.http.scopes import missing_scope
from web.realtime.protocol.capabilities import default_settings
from web.realtime.protocol.client_events import bad_field
from web.realtime.protocol.session_update import served_settings
from web.realtime.protocol.settings import SessionPatch, Settings
from web.realtime.session import Session
from web.realtime.session_registry import SessionRegistry
from web.realtime.telephone.messages import SERVED_FORMAT, CallMessage, Start, parse_message
from web.realtime.telephone.writer import CallWriter
from web.realtime.transport.client_secrets import Credential, Secrets, expired
from web.realtime.transport.refusal import REFUSE_S, clipped_reason, close_code, close_reason
from web.realtime.transport.voice_socket import NORMAL_CLOSURE, VoiceSocket
from web.schema.fields.realtime import CALL

START_S = 10.0
"""Seconds after the connection within which a call must send `start`, the message with its key."""
MAX_BEFORE_START = 8
MAX_SID = 256
KEY = "key"
MULAW = {"type": "audio/pcmu"}


class CallSocket(VoiceSocket):
    """Connection of a telephone call to its voice session. The session ends with the call."""

    def __init__(
        self,
        registry: SessionRegistry,
        websocket: WebSocket,
        writer: CallWriter,
        on_refused: Callable[[FleetError], FleetError],
    ) -> None:
        super().__init__(registry, websocket, writer, on_refused)
        self._call = writer

    async def _enter(self, credential: Credential) -> Session:
        assert credential.settings is not None, "a call begins a session"
        return await self._registry.enter(
            self._call, credential.settings, credential.owner, self._call.send_position
        )

    async def _receive(self, session: Session, frame: str | bytes) -> None:
        session.num_frames += 1
        message = parse_message(frame)
        if message.event == "media" and message.media is not None:
            if message.media.track == "inbound":
                await session.receive_audio(message.media.audio)
        elif message.event == "mark" and message.mark is not None:
            if (played := self._call.played(message.mark.name)) is not None:
                session.record_playback(played)
                session.publish()
        elif message.event == "stop":
            self._call.close(NORMAL_CLOSURE, "the call is over")

    async def _leave(self, entering: asyncio.Task[Session], code: int) -> None:
        await super()._leave(entering, NORMAL_CLOSURE)


class CallRoute:
    """`WS /v1/telephone/twilio`. `on_refused` counts and logs the refusal of a socket, and returns
    the error to send.
    """

    def __init__(
        self,
        gateway: Gateway,
        registry: SessionRegistry,
        secrets: Secrets,
        keys: KeyRing,
        on_refused: Callable[[WebSocket, FleetError], FleetError],
    ) -> None:
        self._gateway, self._registry = gateway, registry
        self._secrets, self._keys = secrets, keys
        self._on_refused = on_refused

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            start = await _read_start(websocket)
            credential = await self._credential(websocket, start)
        except WebSocketDisconnect:
            return
        except FleetError as error:
            await _close(websocket, self._on_refused(websocket, error))
            return
        assert credential.settings is not None
        detection = credential.settings.detection
        interrupts = detection is not None and detection.interrupt_response
        writer = CallWriter(websocket, start.stream_sid, interrupts=interrupts)
        socket = CallSocket(
            self._registry, websocket, writer, lambda error: self._on_refused(websocket, error)
        )
        with acting_as(credential.caller):
            await socket.run(credential)

    async def _credential(self, websocket: WebSocket, start: Start) -> Credential:
        """Return the credential of a call with the settings of its session.

        Raises: Unauthorized, BadInput, UnsupportedValue, ModelNotFound, RedisUnreachable.
        """
        given = start.custom_parameters
        key = given.get(KEY) or websocket.query_params.get(KEY, "")
        if key.startswith(CLIENT_SECRET_PREFIX):
            credential = await self._secrets.credential(key)
        else:
            credential = self._of_key(websocket, key)
        if credential.settings is None:
            raise expired()
        return replace(credential, settings=self._settings(credential.settings, start))

    def _of_key(self, websocket: WebSocket, key: str) -> Credential:
        """Return the credential of a call with an API key: `key`, or the key in the headers of
        `websocket`. Raises: Unauthorized; MissingScope.
        """
        sent = caller_of(websocket.scope)
        caller = sent or self._keys.find(key.encode("utf-8", "surrogatepass"))
        if not self._keys.is_required:
            caller = ANYONE
        if caller is None:
            raise Unauthorized(
                "the API key is missing or wrong; send it as the custom parameter `key`"
            )
        if not caller.may("talk"):
            raise missing_scope(caller, ("talk",), TELEPHONE_PATH)
        return Credential(
            owner=caller.name,
            settings=default_settings(self._gateway),
            caller=caller.in_session(),
        )

    def _settings(self, settings: Settings, start: Start) -> Settings:
        if start.media_format != SERVED_FORMAT:
            raise UnsupportedValue(
                f"start.mediaFormat: only {SERVED_FORMAT.encoding} at 8000 Hz with one channel is "
                "served",
                param="start.mediaFormat",
            )
        if not (self._gateway.hears and self._gateway.speaks):
            raise UnsupportedValue("model: this model does not hear and speak", param="model")
        CALL.check(start.custom_parameters)
        return served_settings(self._gateway, settings, _patch(start.custom_parameters))


def _patch(given: dict[str, str]) -> SessionPatch:
    output: dict[str, object] = {"format": MULAW}
    if "voice" in given:
        output["voice"] = given["voice"]
    own = {name: given[name] for name in ("model", "instructions") if name in given}
    audio = {"input": {"format": MULAW}, "output": output}
    try:
        return SessionPatch.model_validate({"type": "realtime", "audio": audio, **own})
    except ValidationError as error:
        raise bad_field(error, "the custom parameters") from error


async def _read_start(websocket: WebSocket) -> Start:
    """Return the start of a call. Raises: BadInput if no valid start comes within `START_S`;
    WebSocketDisconnect.
    """
    with suppress(TimeoutError):
        start = await asyncio.wait_for(_first_start(websocket), START_S)
        if start is not None and len(start.stream_sid) <= MAX_SID:
            return start
    raise BadInput("event: a call begins with `connected` and `start`", param="event")


async def _first_start(websocket: WebSocket) -> Start | None:
    for _ in range(MAX_BEFORE_START):
        start = (await _read_message(websocket)).start
        if start is not None:
            return start
    return None


async def _read_message(websocket: WebSocket) -> CallMessage:
    received = await websocket.receive()
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(int(received.get("code") or 1005))
    return parse_message(received.get("text") or received.get("bytes") or "")


async def _close(websocket: WebSocket, error: FleetError) -> None:
    """Close a call that is refused; Twilio shows the close code, and reads no error event."""
    try:
        async with asyncio.timeout(REFUSE_S):
            await websocket.close(close_code(error), clipped_reason(close_reason(error)))
    except (TimeoutError, WebSocketDisconnect, RuntimeError):
        return
