"""What wraps every request: its id, its count, the key, and where it may come from. Knows no route's work."""

import hashlib
import hmac
import logging
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleet.core.ids import RequestId, new_request_id
from web.errors import Forbidden, Unauthorized, envelope_of, error_response, internal_error_response
from web.metrics import Metrics

log = logging.getLogger("fleet.web")

COOKIE = "fleet_console"
OPEN_PATHS = ("/health", "/ready", "/metrics", "/console/login", "/static/")
"""Answered without a key: probes, scrapers, and what the login page needs."""
_STATE_KEY = "fleet_request_id"
_CONTENT_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


def request_id_of(scope: Scope) -> RequestId:
    return RequestId(scope["state"][_STATE_KEY])


class RequestContext:
    """Mints the request id, names it in every answer, counts answers, and turns a bug of ours into a plain 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})[_STATE_KEY] = request_id
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
            return
        sender = _Sender(send, scope, request_id, self._metrics)
        try:
            await self.app(scope, receive, sender)
        except ClientDisconnect:
            log.info("request %s: the client left", request_id)
        except Exception:
            # The process loop of this process: the story goes to the log, only this request fails.
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if sender.started:
                raise
            await internal_error_response()(scope, receive, sender)


class _Sender:
    """`send` with our headers on the response's start, and its status counted."""

    def __init__(self, send: Send, scope: Scope, request_id: RequestId, metrics: Metrics) -> None:
        self._send = send
        self._scope = scope
        self._request_id = request_id
        self._metrics = metrics
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            headers["x-content-type-options"] = "nosniff"
            headers["referrer-policy"] = "no-referrer"
            headers["content-security-policy"] = _CONTENT_POLICY
            route = getattr(self._scope.get("route"), "path", "other")
            status = str(message["status"])
            self._metrics.http.labels(method=_method(self._scope), route=route, status=status).inc()
        await self._send(message)


def _method(scope: Scope) -> str:
    """A bounded set of label values: clients may send any word as a method."""
    method = str(scope["method"])
    return method if method in ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS") else "other"


class Guard:
    """Asks for the key where one is set, and refuses what another site's page sends through a visitor's browser."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
        elif isinstance(refusal, Unauthorized) and scope["path"] == "/":
            location = (b"location", b"/console/login")
            await send({"type": "http.response.start", "status": 303, "headers": [location]})
            await send({"type": "http.response.body"})
        else:
            await error_response(envelope_of(refusal), refusal.status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | Forbidden | None:
        headers = Headers(scope=scope)
        if scope["type"] == "websocket" and not _same_origin(headers):
            return Forbidden("origin: the console's socket takes connections from its own page only")
        unsafe = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if unsafe and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return Forbidden("sec-fetch-site: requests from pages of other sites are refused")
        if self._api_key is None or scope["path"].startswith(OPEN_PATHS):
            return None
        if _bearer_is(headers, self._api_key) or _cookie_is(headers, cookie_value(self._api_key)):
            return None
        return Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")


def cookie_value(api_key: str) -> str:
    """What a browser holds in place of the key."""
    return hmac.new(api_key.encode(), b"fleet console", hashlib.sha256).hexdigest()


def same_key(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode())


def _bearer_is(headers: Headers, api_key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and same_key(given.strip().encode("latin-1"), api_key)


def _cookie_is(headers: Headers, expected: str) -> bool:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return False
    return cookie is not None and same_key(cookie.value.encode("latin-1"), expected)


def _same_origin(headers: Headers) -> bool:
    """A program sends no Origin; a browser always does."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")
