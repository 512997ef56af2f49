"""Access rules: the API key, logins of browsers, and what pages of other sites may not do.

Knows no route's work.
"""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from fleet.config.schema import WebConfig
from fleet.core.errors import FleetError, RedisUnreachable
from web.http.cookies import cookie_of
from web.http.errors import Forbidden, ForeignHost, ReadOnly, Unauthorized, envelope_of, error_response
from web.http.hosts import Hosts
from web.http.logins import Logins
from web.http.origins import Origins, not_listed
from web.http.wrong_keys import WrongKeys

COOKIE = "fleet_console"
SECURE_COOKIE = "__Host-fleet_console"
"""Its name under https. Browsers take a cookie of this prefix from nothing but https, and from no other host of the domain."""
CSRF_HEADER = "x-csrf-token"
LOGIN = "/console/login"
METRICS = "/metrics"
OPEN_PATHS = ("/health", "/ready", LOGIN, "/console/logout", "/static/")
"""Answered without a key: probes, and what the login page needs. `web.open_metrics` adds `/metrics`."""
REALTIME = "/v1/realtime"
"""Pages of any site may open this socket with a short-lived key, which is looked up there."""
EPHEMERAL = "ek_"
IN_SUBPROTOCOL = "openai-insecure-api-key."
OPERATING = "/v1/fleet/"
"""What changes the fleet, rather than asking something of the model, is under this path; `web.read_only` closes it."""
_CSRF, _TRUSTED = "fleet_csrf", "fleet_trusted"


def csrf_of(scope: Scope) -> str:
    """Return the CSRF token of the login that a page is rendered for; "" where the client needs none."""
    return str(scope.get("state", {}).get(_CSRF, ""))


def is_trusted(scope: Scope) -> bool:
    """Return True if the client sent the API key, or none is set."""
    return bool(scope.get("state", {}).get(_TRUSTED))


def same_key(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode())


@dataclass(frozen=True, slots=True)
class Rules:
    """`api_key` None asks nobody for a key."""

    api_key: str | None
    web: WebConfig
    hosts: Hosts
    origins: Origins
    logins: Logins
    wrong_keys: WrongKeys

    async def refusal(self, scope: Scope) -> FleetError | None:
        """Return why this request is refused, None if it is not; note in its state for whom pages are rendered.

        Raises: RedisUnreachable where a login cannot be looked up.
        """
        headers = Headers(scope=scope)
        if reason := self.hosts.refusal(headers.get("host")):
            return ForeignHost(reason, param="host")
        offered = offered_key(scope)
        if scope["type"] == "websocket" and scope["path"] == REALTIME and (offered or "").startswith(EPHEMERAL):
            return None
        changes = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS")
        bears_key = self.api_key is not None and same_key((offered or "").encode("latin-1"), self.api_key)
        scope.setdefault("state", {})[_TRUSTED] = bears_key or self.api_key is None
        if not bears_key and (refused := await self._without_key(scope, headers, changes)) is not None:
            return self.wrong_keys.refusal(scope, refused) if offered and self.api_key is not None else refused
        if self.web.read_only and changes and scope["path"].startswith(OPERATING):
            return ReadOnly("this gateway is read-only (web.read_only); ask one that is not, or use the command line")
        return None

    async def _without_key(self, scope: Scope, headers: Headers, changes: bool) -> Unauthorized | Forbidden | None:
        """The rules for requests without the key: from a browser with a login, from pages of other origins, from anywhere."""
        foreign, allowed = _foreign(headers), self.origins.allow(scope)
        if foreign is not None and not allowed and (changes or scope["type"] == "websocket"):
            return Forbidden(foreign)
        if self.api_key is None or self._is_open(scope["path"]):
            return None
        login = login_token(scope)
        if (foreign is not None and allowed) or not await self.logins.known(login):
            return Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        csrf = self.logins.csrf_token(login)
        if changes and not same_key(headers.get(CSRF_HEADER, "").encode("latin-1"), csrf):
            return Forbidden(f"{CSRF_HEADER}: missing or wrong; load the console's page again, or send the key as Bearer")
        scope["state"][_CSRF] = csrf
        return None

    def _is_open(self, path: str) -> bool:
        return path.startswith(OPEN_PATHS) or (self.web.open_metrics and path == METRICS)


class Guard:
    """The rules as a wrapper around the app: a refused program gets the error, a refused browser the login page."""

    def __init__(self, app: ASGIApp, rules: Rules, refuse_socket: Callable[[WebSocket, FleetError], Awaitable[None]]) -> None:
        self.app = app
        self._rules = rules
        self._refuse_socket = refuse_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            refusal = await self._rules.refusal(scope)
        except FleetError as error:
            refusal = error
        if refusal is None:
            if scope["type"] == "http" and csrf_of(scope):
                send = _WhileLoggedIn(send, self._rules.logins, login_token(scope))
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._refuse_socket(WebSocket(scope, receive, send), refusal)
        elif isinstance(refusal, Unauthorized) and _wants_page(scope):
            where = f"{LOGIN}?next={quote(scope['path'], safe='/')}" if scope["path"] != "/" else LOGIN
            await send({"type": "http.response.start", "status": 303, "headers": [(b"location", where.encode())]})
            await send({"type": "http.response.body"})
        else:
            response = error_response(envelope_of(refusal), refusal.status, retry_after_s=refusal.retry_after_s)
            await response(scope, receive, send)


class _WhileLoggedIn:
    """`send` that ends a stream once the login it was opened by has ended; Redis must say so."""

    def __init__(self, send: Send, logins: Logins, login: str) -> None:
        self._send = send
        self._logins = logins
        self._login = login

    async def __call__(self, message: Message) -> None:
        if message.get("more_body") and not await self._is_known():
            await self._send({"type": "http.response.body", "body": b""})
            raise ClientDisconnect
        await self._send(message)

    async def _is_known(self) -> bool:
        try:
            return await self._logins.known(self._login)
        except RedisUnreachable:
            return True


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


def cookie_name(scope: Scope) -> str:
    return SECURE_COOKIE if scope["scheme"] in ("https", "wss") else COOKIE


def login_token(scope: Scope) -> str:
    """Return the token in the console's cookie, "" where there is none."""
    return cookie_of(Headers(scope=scope).get("cookie", ""), cookie_name(scope))


def offered_key(scope: Scope) -> str | None:
    """The key a connection bears: as Bearer, or as a subprotocol, since a browser can send no header with a WebSocket."""
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    for protocol in scope.get("subprotocols", []):
        if str(protocol).startswith(IN_SUBPROTOCOL):
            return str(protocol).removeprefix(IN_SUBPROTOCOL)
    return None
