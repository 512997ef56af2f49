"""Who may ask, and by what name: the API key, the cookie that stands for it in a browser, what pages of other sites may not do.

Knows no route's work.
"""

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from web.cookies import cookie_of
from web.errors import Forbidden, ForeignHost, ReadOnly, Unauthorized, envelope_of, error_response
from web.hosts import Hosts
from web.origins import Origins, not_listed
from web.realtime.refusal import refuse_socket

COOKIE = "fleet_console"
CSRF_HEADER = "x-csrf-token"
LOGIN = "/console/login"
OPEN_PATHS = ("/health", "/ready", "/metrics", LOGIN, "/console/logout", "/static/")
"""Answered without a key: probes, scrapers, and what the login page needs."""
REALTIME = "/v1/realtime"
"""Pages of any site may open this socket with a short-lived key, which is looked up there."""
EPHEMERAL = "ek_"
IN_SUBPROTOCOL = "openai-insecure-api-key."
OPERATING = "/v1/fleet/"
"""What changes the fleet, rather than asking something of the model, is under this path; `web.read_only` closes it."""


def cookie_value(api_key: str) -> str:
    """What a browser holds in place of the key."""
    return _derived(api_key, b"fleet console")


def csrf_token(api_key: str | None) -> str:
    """What our pages send along with every change, and a page of another site cannot read. Empty where no key is set."""
    return _derived(api_key, b"fleet csrf") if api_key is not None else ""


def same_key(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode())


def _derived(api_key: str, purpose: bytes) -> str:
    return hmac.new(api_key.encode(), purpose, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Rules:
    """`api_key` None asks nobody for a key."""

    api_key: str | None
    read_only: bool
    hosts: Hosts
    origins: Origins

    def refusal(self, scope: Scope) -> Unauthorized | Forbidden | ForeignHost | ReadOnly | None:
        if reason := self.hosts.refusal(Headers(scope=scope).get("host")):
            return ForeignHost(reason, param="host")
        if scope["type"] == "websocket" and scope["path"] == REALTIME and (offered_key(scope) or "").startswith(EPHEMERAL):
            return None
        headers = Headers(scope=scope)
        changes = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS")
        bears_key = self.api_key is not None and same_key((offered_key(scope) or "").encode("latin-1"), self.api_key)
        if not bears_key and (refused := self._without_key(scope, headers, changes)) is not None:
            return refused
        if self.read_only and changes and scope["path"].startswith(OPERATING):
            return ReadOnly("this gateway is read-only (web.read_only); ask one that is not, or use the command line")
        return None

    def _without_key(self, scope: Scope, headers: Headers, changes: bool) -> Unauthorized | Forbidden | None:
        """The rules for requests without the key: from a browser with the cookie, from pages of other origins, from anywhere."""
        foreign, allowed = _foreign(headers), self.origins.allow(scope)
        if foreign is not None and not allowed and (changes or scope["type"] == "websocket"):
            return Forbidden(foreign)
        if self.api_key is None or scope["path"].startswith(OPEN_PATHS):
            return None
        if (foreign is not None and allowed) or not same_key(_login_of(headers), cookie_value(self.api_key)):
            return Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        token = headers.get(CSRF_HEADER, "").encode("latin-1")
        if changes and not same_key(token, csrf_token(self.api_key)):
            return Forbidden(f"{CSRF_HEADER}: missing or wrong; load the console's page again, or send the key as Bearer")
        return None


class Guard:
    """The rules as a wrapper around the app: a refused program gets the error, a refused browser the login page."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._rules.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await refuse_socket(WebSocket(scope, receive, send), refusal)
        elif isinstance(refusal, Unauthorized) and _wants_page(scope):
            where = f"{LOGIN}?next={quote(scope['path'], safe='/')}" if scope["path"] != "/" else LOGIN
            await send({"type": "http.response.start", "status": 303, "headers": [(b"location", where.encode())]})
            await send({"type": "http.response.body"})
        else:
            await error_response(envelope_of(refusal), refusal.status)(scope, receive, send)


def _wants_page(scope: Scope) -> bool:
    """A person opens an address; programs of the API are told that their key is wrong."""
    if scope["path"] == "/":
        return True
    asks_html = "text/html" in Headers(scope=scope).get("accept", "")
    return scope["method"] == "GET" and asks_html and not scope["path"].startswith(("/v1/", "/console/"))


def _foreign(headers: Headers) -> str | None:
    """Why this comes from a page of another site; None where it does not. A program sends no Origin; a browser always does."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return (
            f"{not_listed(origin)} to let them call the API; the console's changes and sockets come from its own pages only "
            "(a proxy must pass the Host header on unchanged)"
        )
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return "sec-fetch-site: requests from pages of other sites are refused"
    return None


def _login_of(headers: Headers) -> bytes:
    return cookie_of(headers.get("cookie", ""), COOKIE).encode("latin-1")


def offered_key(scope: Scope) -> str | None:
    """The key a connection bears: as Bearer, or as a subprotocol, since a browser can send no header with a WebSocket."""
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    for protocol in scope.get("subprotocols", []):
        if str(protocol).startswith(IN_SUBPROTOCOL):
            return str(protocol).removeprefix(IN_SUBPROTOCOL)
    return None
