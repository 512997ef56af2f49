"""What wraps every request: its id, its count, the headers of every answer. Knows no route's work."""

import logging

from prometheus_client import Counter
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleet.core.ids import RequestId, new_request_id
from web.http.body import BodyMemory
from web.http.errors import internal_error_response

log = logging.getLogger("fleet.web")

_STATE_KEY = "fleet_request_id"
CONTENT_POLICY = "default-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
"""No inline script or style anywhere, and nothing from another host; a page may set a policy of its own."""


def request_id_of(scope: Scope) -> RequestId:
    return RequestId(scope["state"][_STATE_KEY])


def known_request_id(scope: Scope) -> RequestId | None:
    """Return the request's id, or None before it has one."""
    return scope["state"].get(_STATE_KEY)


class RequestContext:
    """Mints the request id, names it in every answer, counts answers, frees the memory of its body, and turns a bug of ours into
    a plain 500.
    """

    def __init__(self, app: ASGIApp, responses: Counter, bodies: BodyMemory) -> None:
        self.app = app
        self._responses = responses
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})[_STATE_KEY] = request_id
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
            return
        sender = _Sender(send, scope, request_id, self._responses)
        try:
            with self._bodies.held_by(scope):
                await self.app(scope, receive, sender)
        except ClientDisconnect:
            # a page that is closed is no news
            level = logging.DEBUG if scope["path"].startswith("/console/") else logging.INFO
            log.log(level, "request %s: the client left", request_id)
        except Exception:
            # The process loop of this process: the story goes to the log, only this request fails.
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if sender.started:
                raise
            await internal_error_response()(scope, receive, sender)


class _Sender:
    """`send` with our headers on the response's start, and its status counted."""

    def __init__(self, send: Send, scope: Scope, request_id: RequestId, responses: Counter) -> None:
        self._send = send
        self._scope = scope
        self._request_id = request_id
        self._responses = responses
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            headers["x-content-type-options"] = "nosniff"
            # not "no-referrer": with that, browsers name no origin in a form's POST, and it could not be told from another site's
            headers["referrer-policy"] = "same-origin"
            headers.setdefault("content-security-policy", CONTENT_POLICY)
            route = getattr(self._scope.get("route"), "path", "other")
            status = str(message["status"])
            self._responses.labels(method=_method(self._scope), route=route, status=status).inc()
        await self._send(message)


def _method(scope: Scope) -> str:
    """A bounded set of label values: clients may send any word as a method."""
    method = str(scope["method"])
    return method if method in ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS") else "other"
