"""Routes of the voice sessions: the two WebSockets, calls, client secrets, and the list of live
sessions. Knows no event.
"""

from dataclasses import replace

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from fleet.core.errors import FleetError, NotFound, quoted
from fleet.core.ids import RequestId
from web.gateway.gateway import Gateway
from web.http.callers import ANYONE, acting_as, caller_of, current_caller
from web.http.errors import (
    Unauthorized,
    UnknownSocket,
    UnsupportedValue,
    UpgradeRequired,
    refusal_response,
)
from web.http.guard import CLIENT_SECRET_PREFIX, TELEPHONE_PATH, client_key
from web.http.json_response import json_response
from web.http.key_ring import KeyRing
from web.http.protocol.abuse import TimedAbuseLog
from web.http.wrong_keys import WrongKeys
from web.realtime.clock import Clock
from web.realtime.protocol.capabilities import default_settings, takes_text_only
from web.realtime.protocol.transcription_session import TRANSCRIPTION, only_transcribing
from web.realtime.session_registry import SessionRegistry
from web.realtime.session_views import SessionView, decode_view, read_views
from web.realtime.telephone.call import CallRoute
from web.realtime.transport.client_secrets import Credential, Secrets, expired, key_name
from web.realtime.transport.refusal import accept, log_refusal, refuse_socket
from web.realtime.transport.session_routes import RecordedSessionRoutes
from web.realtime.transport.socket_writers import ConsoleWriter, SocketWriter
from web.realtime.transport.voice_socket import VoiceSocket
from web.realtime.webrtc.routes import WebRtcRoutes
from web.schema.fields.realtime import QUERY

ON = ("1", "true", "yes")
INTENTS = ("", "conversation", "realtime", TRANSCRIPTION)


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[SessionView]


class SessionEnded(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "fleet.session.ended"
    ended: bool = True


class VoiceRoutes:
    def __init__(
        self,
        gateway: Gateway,
        keys: KeyRing,
        wrong_keys: WrongKeys,
        lines: TimedAbuseLog,
        clock: Clock | None = None,
    ) -> None:
        self.registry = SessionRegistry(gateway, clock)
        self._gateway = gateway
        self._wrong_keys = wrong_keys
        self._lines = lines
        self._secrets = Secrets(gateway, keys)
        self._call = CallRoute(gateway, self.registry, self._secrets, keys, self._on_refused)
        self._webrtc = WebRtcRoutes(gateway, self.registry, self.authenticate, self.end_session)

    def routes(self) -> list[BaseRoute]:
        return [
            WebSocketRoute("/v1/realtime", self.realtime),
            Route("/v1/realtime", self.no_socket, methods=["GET"]),
            WebSocketRoute("/console/ws", self.console),
            WebSocketRoute(TELEPHONE_PATH, self._call.serve),
            Route("/v1/realtime/client_secrets", self._secrets.create, methods=["POST"]),
            *self._webrtc.routes(),
            Route("/v1/fleet/sessions", self.sessions, methods=["GET"]),
            Route("/v1/fleet/sessions/{session_id}", self.end, methods=["DELETE"]),
            *RecordedSessionRoutes(self._gateway).routes(),
            WebSocketRoute("/{path:path}", self.no_such_socket),
        ]

    async def calls_left(self) -> None:
        """Wait until the WebRTC calls of this gateway, which is stopping, are closed, so that their
        clients can continue at another gateway at once.
        """
        await self._webrtc.left()

    async def realtime(self, websocket: WebSocket) -> None:
        try:
            credential = await self.authenticate(websocket)
        except FleetError as error:
            await refuse_socket(websocket, error, self._lines)
            return
        await accept(websocket)
        fleet = websocket.query_params.get("fleet", "").lower() in ON
        await self._serve(websocket, SocketWriter(websocket, fleet=fleet), credential)

    async def no_socket(self, _request: Request) -> Response:
        error = UpgradeRequired(
            "this is a WebSocket: connect with ws:// or wss://, as OpenAI's realtime clients do"
        )
        return refusal_response(error, {"upgrade": "websocket"})

    async def no_such_socket(self, websocket: WebSocket) -> None:
        path = websocket.scope["path"][:80]
        error = UnknownSocket(f"there is no WebSocket at {path!r}; connect to /v1/realtime")
        await refuse_socket(websocket, error, self._lines)

    async def console(self, websocket: WebSocket) -> None:
        await accept(websocket)
        credential = self._credential_of(websocket)
        await self._serve(websocket, ConsoleWriter(websocket), credential)

    async def _serve(
        self, websocket: WebSocket, writer: SocketWriter, credential: Credential
    ) -> None:
        with acting_as(credential.caller):
            await VoiceSocket(
                self.registry, websocket, writer, lambda error: self._on_refused(websocket, error)
            ).run(credential)

    def _on_refused(self, websocket: WebSocket, error: FleetError) -> FleetError:
        counted = self._counted(websocket, error)
        log_refusal(self._lines, websocket.scope, counted)
        return counted

    def _counted(self, client: HTTPConnection, error: FleetError) -> FleetError:
        """Return the error with which to refuse a client. A wrong client secret counts as a wrong
        key, and becomes TooManyWrongKeys during a back-off.
        """
        return (
            self._wrong_keys.refusal(client.scope, error)
            if isinstance(error, Unauthorized)
            else error
        )

    def _credential_of(self, client: HTTPConnection) -> Credential:
        """Return the credential of a client that has sent an API key, or needs none."""
        caller = caller_of(client.scope) or ANYONE
        return Credential(
            owner=caller.name,
            settings=default_settings(self._gateway),
            caller=caller.in_session(),
        )

    async def authenticate(self, client: HTTPConnection) -> Credential:
        """Return the credential of a client; a wrong client secret is counted as a wrong key.

        Raises: TooManyWrongKeys, and the errors of `_credential`.
        """
        try:
            return await self._credential(client)
        except Unauthorized as error:
            raise self._counted(client, error) from None

    async def _credential(self, client: HTTPConnection) -> Credential:
        """Return the credential of a client, after checking its key and then its query, so that a
        client without a key learns nothing of this server. An expired secret can only continue its
        session.

        Raises: Unauthorized, ModelNotFound, UnsupportedValue, RedisUnreachable.
        """
        key = client_key(client.scope)
        credential = self._credential_of(client)
        if key is not None and key.startswith(CLIENT_SECRET_PREFIX):
            credential = await self._secrets.credential(key)
        if credential.settings is None:
            if not client.query_params.get("session"):
                raise expired()
            return credential
        QUERY.check(client.query_params)
        intent = client.query_params.get("intent", "")
        if intent not in INTENTS:
            message = f"{intent[:80]!r} is not served; use conversation or transcription"
            raise UnsupportedValue(f"intent: {message}", param="intent")
        self._gateway.check_model(client.query_params.get("model") or self._gateway.model)
        if intent != TRANSCRIPTION:
            return credential
        if not self._gateway.hears:
            raise takes_text_only("intent")
        settings = credential.settings
        return replace(credential, settings=only_transcribing(settings, settings.audio.input))

    async def sessions(self, _request: Request) -> Response:
        """Answer GET /v1/fleet/sessions: the live sessions of all gateways, the newest first."""
        return json_response(SessionList(data=await read_views(self._gateway)))

    async def end(self, request: Request) -> Response:
        """Answer DELETE /v1/fleet/sessions/{id}: end a session of any gateway, with its response
        under way.
        """
        session_id = str(request.path_params["session_id"])
        await self.end_session(session_id, "session_id")
        return json_response(SessionEnded(id=session_id))

    async def end_session(self, session_id: str, param: str) -> None:
        """End a session of any gateway: any session with the scope `operate`, otherwise only a
        session of the caller's key. `param` is the parameter that an error names.

        Another gateway closes its session at its next write; the request of its response is aborted
        here. Raises: NotFound, also for sessions of other keys; RedisUnreachable.
        """
        client, view = self._gateway.client, None
        owner = self.registry.owner_of(session_id)
        key = key_name(owner) if owner is not None else None
        if owner is None and (raw := (await client.voice.views()).get(session_id)) is not None:
            view = decode_view(raw)
            key = view.key
        may_end = current_caller().may("operate") or key == current_caller().name
        if may_end and self.registry.end(session_id, by_operator=True):
            return
        if not may_end or not await client.voice.end(session_id):
            raise NotFound(
                f"no session {quoted(session_id)}; it never existed, or is over", param=param
            )
        if view is not None and view.request_id is not None:
            await client.requests.abort(RequestId(view.request_id))
