"""Middleware of every request: sets its id and the headers of its response, and counts
responses.
"""

import logging

import msgspec
from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleet.core.ids import RequestId, new_request_id
from fleet.core.trace_context import (
    TRACEPARENT,
    TraceParent,
    called_within,
    current_traceparent,
    parse_traceparent,
    span_id_of,
)
from web.http.body import BodyMemory
from web.http.errors import internal_error_response
from web.http.priority import prioritized
from web.http.refused_work import RefusedWork, charging
from web.http.wrong_keys import address_of

log = logging.getLogger("fleet.web")

_STATE_KEY = "fleet_request_id"
CONTENT_POLICY = (
    "default-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri "
    "'none'; form-action 'self'"
)
"""Content-Security-Policy of pages: no inline scripts or styles, and nothing from another host. A
page may set a policy of its own.
"""


def request_id_of(scope: Scope) -> RequestId:
    return RequestId(scope["state"][_STATE_KEY])


def request_id_or_none(scope: Scope) -> RequestId | None:
    """Return the id of a request, or None if `RequestContext` has not assigned it."""
    return scope["state"].get(_STATE_KEY)


class RequestContext:
    """ASGI middleware that creates the request id, sets response headers, counts responses, frees
    body memory, and turns unexpected errors into a 500.

    The time spent on inputs that are refused is charged to the client's address.
    """

    def __init__(self, app: ASGIApp, responses: Counter, bodies: BodyMemory) -> None:
        self.app = app
        self._responses = responses
        self._bodies = bodies
        self._refused = RefusedWork()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})[_STATE_KEY] = request_id
        with (
            charging(self._refused, address_of(scope)),
            prioritized(scope),
            called_within(_traceparent_of(scope)),
        ):
            if scope["type"] == "websocket":
                await self.app(scope, receive, send)
            else:
                await self._respond(scope, receive, send, request_id)

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, request_id: RequestId
    ) -> None:
        sender = _ResponseStart(send, scope, request_id, self._responses)
        try:
            with self._bodies.track(scope):
                await self.app(scope, receive, sender)
        except ClientDisconnect:
            # closed pages are logged at DEBUG only
            level = logging.DEBUG if scope["path"].startswith("/console/") else logging.INFO
            log.log(level, "request %s: the client disconnected", request_id)
        except Exception:
            # the process loop of the gateway: only this request fails
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if sender.started:
                raise
            await internal_error_response()(scope, receive, sender)


class _ResponseStart:
    """ASGI `send` that sets the headers of a response and counts the response by its status."""

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
            if (parent := current_traceparent()) is not None:
                own = msgspec.structs.replace(parent, span_id=span_id_of(self._request_id))
                headers["traceresponse"] = own.header
            headers["x-content-type-options"] = "nosniff"
            # not "no-referrer", with which a form's POST has no Origin and looks like a cross-site
            # request
            headers["referrer-policy"] = "same-origin"
            headers.setdefault("content-security-policy", CONTENT_POLICY)
            route = getattr(self._scope.get("route"), "path", "other")
            status = str(message["status"])
            self._responses.labels(method=_method(self._scope), route=route, status=status).inc()
        await self._send(message)


def _traceparent_of(scope: Scope) -> TraceParent | None:
    """Return the span in the request's `traceparent` header; None if the header is missing,
    repeated or malformed.
    """
    sent = Headers(scope=scope).getlist(TRACEPARENT)
    return parse_traceparent(sent[0].strip()) if len(sent) == 1 else None


def _method(scope: Scope) -> str:
    """Return the request's method as a label value of metrics; methods outside of a fixed set share
    one value, since clients may send any word.
    """
    method = str(scope["method"])
    return (
        method
        if method in ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS")
        else "other"
    )
