"""Routes of calls: `POST /v1/realtime/calls` with a WebRTC offer, and the end of a call.

`aiortc` is imported by the first call. Knows no event.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import ValidationError
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import BadInput, Overloaded, UnsupportedValue
from fleet.process.background import start
from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.callers import acting_as
from web.http.forms import open_form
from web.http.offload import parse_body
from web.http.origins import CALLS_PATH
from web.realtime.admission import Admission
from web.realtime.protocol.client_events import bad_field
from web.realtime.protocol.session_update import served_settings
from web.realtime.protocol.settings import SessionPatch
from web.realtime.session import Session
from web.realtime.session_registry import SessionRegistry
from web.realtime.transport.client_secrets import Credential, is_of_secret
from web.realtime.transport.voice_socket import open_session
from web.realtime.webrtc.offer import MAX_OFFER_BYTES
from web.schema.chat import read_json
from web.schema.fields.realtime import SESSION, WEBRTC

if TYPE_CHECKING:
    from web.realtime.webrtc.call import WebRtcCall

MAX_BODY_BYTES = 2 * MAX_OFFER_BYTES + 64 * 1024
"""Limit of an offer, of the session's settings, and of the form around them."""
SDP, FORM = "application/sdp", "multipart/form-data"
ON = ("1", "true", "yes")
LEAVE_S = 3.0
"""Seconds for the last events of calls, and for closing them, when the gateway stops."""
_CALL, _SESSION = "rtc_", "sess_"

Authenticate = Callable[[HTTPConnection], Awaitable[Credential]]
EndSession = Callable[[str, str], Awaitable[None]]


class WebRtcRoutes:
    """Routes of WebRTC calls. A call has the id of its session, so that any gateway can end it.

    `authenticate` returns the credential of a client, and `end_session` ends a session of the
    caller; its second argument names the parameter in the error.
    """

    def __init__(
        self,
        gateway: Gateway,
        registry: SessionRegistry,
        authenticate: Authenticate,
        end_session: EndSession,
    ) -> None:
        self._gateway = gateway
        self._registry = registry
        self._authenticate = authenticate
        self._end_session = end_session
        self._serving: dict[asyncio.Task[None], str] = {}
        """Tasks of the calls, with the ids of their sessions."""
        voice = gateway.config.voice
        what = "WebRTC calls (voice.max_calls; a WebSocket may have a place)"
        self._admission = Admission(voice.max_calls, 0, voice.secret_share, what=what)

    async def left(self) -> None:
        """Wait until all calls are over, for `LEAVE_S` at most."""
        if self._serving:
            await asyncio.wait(self._serving, timeout=LEAVE_S)

    def routes(self) -> list[BaseRoute]:
        return [
            Route(CALLS_PATH, self.create, methods=["POST"]),
            Route(CALLS_PATH + "/{call_id}/hangup", self.hang_up, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/realtime/calls: open a session, or resume one, for a client that offers a
        WebRTC connection.
        """
        credential = await self._authenticate(request)
        make_call = await asyncio.to_thread(_call_class)
        offer, patch = await _read(request)
        if patch is not None:
            credential = self._with_settings(request, credential, patch)
        is_fleet = request.query_params.get("fleet", "").lower() in ON
        self._admit(request.query_params.get("session"), credential)
        call = make_call(self._gateway.config.voice, fleet=is_fleet)
        with acting_as(credential.caller):
            try:
                answer = await call.answer(offer)
                session = await self._open(call, request, credential)
            except BaseException:
                self._release(credential)
                await call.discard()
                raise
            serving = start(self._serve(call, session), "a call")
            self._serving[serving] = session.id
            serving.add_done_callback(self._serving.pop)
            serving.add_done_callback(lambda _: self._release(credential))
        location = f"{CALLS_PATH}/{_CALL}{session.id.removeprefix(_SESSION)}"
        return Response(answer, 201, {"location": location}, media_type=SDP)

    async def hang_up(self, request: Request) -> Response:
        """Answer POST /v1/realtime/calls/{call_id}/hangup: end a call of any gateway, and its
        session. Keys without the scope `operate` end only their own.
        """
        call_id = str(request.path_params["call_id"])
        await self._end_session(_SESSION + call_id.removeprefix(_CALL), "call_id")
        return Response()

    def _with_settings(
        self, request: Request, credential: Credential, patch: SessionPatch
    ) -> Credential:
        if request.query_params.get("session") or credential.settings is None:
            message = "session: the session that is resumed has its settings; send session.update"
            raise BadInput(message, param="session")
        settings = served_settings(self._gateway, credential.settings, patch)
        return replace(credential, settings=settings)

    def _admit(self, session_id: str | None, credential: Credential) -> None:
        """Count a call toward `voice.max_calls`. A call that resumes the session of a call at this
        gateway is admitted beyond the limit, since it replaces that call.

        Raises: Overloaded.
        """
        by_secret = is_of_secret(credential.owner)
        if session_id in self._serving.values():
            self._admission.add(by_secret=by_secret)
            return
        try:
            self._admission.join(by_secret=by_secret, on_position=lambda _: None)
        except Overloaded as error:
            self._gateway.client.telemetry.record_refusal(error)
            raise

    def _release(self, credential: Credential) -> None:
        self._admission.release(by_secret=is_of_secret(credential.owner))

    async def _open(self, call: "WebRtcCall", request: Request, credential: Credential) -> Session:
        """Open the session. Raises: Overloaded instead of waiting in the queue, since an offer is
        not valid for long.
        """

        def refuse(_position: int) -> None:
            opening.cancel()

        query = request.query_params
        opening = asyncio.ensure_future(
            open_session(self._registry, call.writer, credential, query, refuse)
        )
        try:
            return await opening
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = Overloaded(
                "all voice sessions of this gateway are taken; try again shortly, or wait in line "
                "over a WebSocket"
            )
            self._gateway.client.telemetry.record_refusal(error)
            raise error from None

    async def _serve(self, call: "WebRtcCall", session: Session) -> None:
        is_closed = False
        try:
            is_closed = await call.serve(session, self._gateway.closing)
        finally:
            on_end = self._registry.on_closed if is_closed else self._registry.on_lost
            on_end(session, call.writer)


def _call_class() -> "type[WebRtcCall]":
    """Return the class of calls; the first time it is imported, which takes half a second. Raises:
    UnsupportedValue without aiortc.
    """
    if find_spec("aiortc") is None:
        raise UnsupportedValue(
            "calls over WebRTC need a package that is not installed here: pip install "
            "'fleet-serving[webrtc]'; or open a WebSocket at /v1/realtime?model=MODEL"
        )
    from web.realtime.webrtc.call import WebRtcCall

    return WebRtcCall


async def _read(request: Request) -> tuple[str, SessionPatch | None]:
    """Return the offer of a request, and the settings of its session if it has any.

    Raises: BadInput, InputTooLarge, UnsupportedValue.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (SDP, FORM):
        raise BadInput(
            f"content-type: send the offer as {SDP}, or {FORM} with the fields sdp and session"
        )
    raw = await read_body(request, MAX_OFFER_BYTES if kind == SDP else MAX_BODY_BYTES)
    if kind == SDP:
        return _text(raw, "sdp"), None
    async with open_form(request.headers, raw) as form:
        fields: dict[str, bytes] = {}
        for name, value in form.multi_items():
            is_text = isinstance(value, str)
            fields[name] = value.encode() if is_text else await value.read()
    WEBRTC.check({name: _text(value, name) for name, value in fields.items()})
    if "sdp" not in fields:
        raise BadInput("sdp: this field is required", param="sdp")
    patch = fields.get("session")
    offer = _text(fields["sdp"], "sdp")
    return offer, await parse_body(_parse_session, patch) if patch else None


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: not UTF-8", param=name) from error


def _parse_session(raw: bytes) -> SessionPatch:
    try:
        patch = SessionPatch.model_validate(read_json(raw))
    except ValidationError as error:
        raise bad_field(error, "session", within="session") from error
    for refused in SESSION.refusals(patch, "session"):
        raise refused
    return patch
