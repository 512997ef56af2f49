"""Access rules: API keys, logins of browsers, and cross-site requests. Knows no route's work."""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from fleet.config.api_keys import ACTING_FOR_HEADER
from fleet.config.schema import WebConfig
from fleet.core.errors import FleetError, RedisUnreachable, quoted
from web.http.callers import (
    ANYONE,
    METRICS_READER,
    UNCHECKED_SECRET,
    acting_as,
    caller_of,
    set_caller,
)
from web.http.cookies import read_cookie
from web.http.csrf_mask import mask, unmask
from web.http.errors import (
    Forbidden,
    ForeignHost,
    MissingScope,
    ReadOnly,
    Unauthorized,
    refusal_response,
)
from web.http.hosts import AllowedHosts
from web.http.key_ring import KeyRing
from web.http.logins import Logins
from web.http.origins import CALLS_PATH, AllowedOrigins, not_listed
from web.http.wrong_keys import WrongKeys

COOKIE = "fleet_console"
SECURE_COOKIE = "__Host-fleet_console"
"""Name of the login cookie under https. Browsers accept the prefix `__Host-` only over https, and
not from other hosts of the domain.
"""
CSRF_HEADER = "x-csrf-token"
LOGIN_PATH = "/console/login"
METRICS_PATH = "/metrics"
TELEPHONE_PATH = "/v1/telephone/twilio"
"""Path of the WebSocket for telephone calls. The telephone provider cannot send headers, so the
route checks the key in the first message.
"""
OPEN_PATHS = ("/health", "/ready", LOGIN_PATH, "/console/logout", "/static/", TELEPHONE_PATH)
"""Paths served without a key: probes, the login page, and telephone calls. `web.open_metrics` adds
`/metrics`.
"""
BY_CLIENT_SECRET = (("websocket", "/v1/realtime"), ("http", CALLS_PATH))
"""Kinds and paths of the requests that pages of any site may make with a client secret; the routes
themselves check the secret.
"""
CLIENT_SECRET_PREFIX = "ek_"
KEY_SUBPROTOCOL_PREFIX = "openai-insecure-api-key."
FLEET_API_PATH = "/v1/fleet/"
"""Path below which all operations on the fleet are; `web.read_only` refuses changes there."""
_CSRF, _SENT_KEY = "fleet_csrf", "fleet_sent_key"


def csrf_of(scope: Scope) -> str:
    """Return the CSRF token that the page of this request must send with changes, masked anew for
    each request; "" without a login.
    """
    return str(scope.get("state", {}).get(_CSRF, ""))


def is_trusted(scope: Scope) -> bool:
    """Return True if the request has a caller: a valid API key, a login or a client secret, or a
    gateway that requires no key. False only for requests to open paths.
    """
    return caller_of(scope) is not None


def owner_of(scope: Scope) -> str:
    """Return the digest under which the client's files, batches and responses are stored; other
    clients do not see them. The digest is made from the name of the API key, or, at a gateway
    without keys, from any key that the client sent; "" if the client sent none.
    """
    caller = caller_of(scope)
    name = str(scope.get("state", {}).get(_SENT_KEY, ""))
    if caller is not None and caller is not ANYONE:
        name = f"name {caller.name}"
    return sha256(name.encode("utf-8", "surrogateescape")).hexdigest() if name else ""


def keys_equal(key: bytes, expected: str) -> bool:
    return hmac.compare_digest(key, expected.encode())


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Access rules of a gateway, which decide about each request. `keys`: accepted API keys, one of
    which a client must send. The routes decide what each key may do (`web/http/scopes.py`).
    """

    keys: KeyRing
    web: WebConfig
    hosts: AllowedHosts
    origins: AllowedOrigins
    logins: Logins
    wrong_keys: WrongKeys

    async def find_refusal(self, scope: Scope) -> FleetError | None:
        """Return the error with which to refuse a request, or None to accept it. Stores the caller
        in the request's state, and the CSRF token of a login. Counts wrong keys by client address.

        Raises: RedisUnreachable if a login cannot be checked.
        """
        headers = Headers(scope=scope)
        if reason := self.hosts.find_refusal(headers.get("host")):
            return ForeignHost(reason, param="host")
        key = client_key(scope)
        if (scope["type"], scope["path"]) in BY_CLIENT_SECRET and (key or "").startswith(
            CLIENT_SECRET_PREFIX
        ):
            set_caller(scope, UNCHECKED_SECRET)
            return None
        changes = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS")
        caller = self.keys.find(key.encode("latin-1")) if key else None
        set_caller(scope, caller if self.keys.is_required else ANYONE)
        scope["state"][_SENT_KEY] = key or ""
        if (
            caller is None
            and (refused := await self._without_key(scope, headers, changes)) is not None
        ):
            return (
                self.wrong_keys.refusal(scope, refused)
                if key and self.keys.is_required
                else refused
            )
        if caller is not None and (name := headers.get(ACTING_FOR_HEADER)):
            if not caller.may("operate"):
                return MissingScope(
                    f"{ACTING_FOR_HEADER}: acting for another key needs the scope operate, which "
                    f"the key {caller.name!r} does not have; leave the header out"
                )
            if (represented := self.keys.maker_of(name, None)) is None:
                return Unauthorized(
                    f"{ACTING_FOR_HEADER}: the gateway accepts no key of the name {quoted(name)}; "
                    "`fleet keys list` shows the names"
                )
            set_caller(scope, represented)
        if self.web.open_metrics and scope["path"] == METRICS_PATH:
            set_caller(scope, METRICS_READER)
        if self.web.read_only and changes and scope["path"].startswith(FLEET_API_PATH):
            return ReadOnly(
                "this gateway is read-only (web.read_only); ask one that is not, or use the "
                "command line"
            )
        return None

    async def _without_key(
        self, scope: Scope, headers: Headers, changes: bool
    ) -> Unauthorized | Forbidden | None:
        """Return the error with which to refuse a request that does not have the API key, or None.

        A page of an origin that is not allowed may change nothing and open no WebSocket. If the
        gateway has an API key, a browser needs a login instead, and a CSRF token for changes; open
        paths need neither. `changes` is True for methods that change something.
        """
        foreign, allowed = _foreign(headers), self.origins.allow(scope)
        if foreign is not None and not allowed and (changes or scope["type"] == "websocket"):
            return Forbidden(foreign)
        if not self.keys.is_required or self._is_open(scope["path"]):
            return None
        login = login_token(scope)
        caller = await self.logins.caller_of(login)
        if (foreign is not None and allowed) or caller is None:
            return Unauthorized(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            )
        csrf = self.logins.csrf_token(login)
        if changes and not keys_equal(unmask(headers.get(CSRF_HEADER, "")).encode(), csrf):
            return Forbidden(
                f"{CSRF_HEADER}: missing or wrong; load the console's page again, or send the "
                "key as Bearer"
            )
        scope["state"][_CSRF] = mask(csrf)
        set_caller(scope, caller)
        return None

    def _is_open(self, path: str) -> bool:
        return path.startswith(OPEN_PATHS) or (self.web.open_metrics and path == METRICS_PATH)


RefuseSocket = Callable[[WebSocket, FleetError], Awaitable[None]]


class Guard:
    """ASGI middleware that checks each request against the gateway's `AccessRules`: API key,
    logins, allowed hosts and origins. A refused API client gets the error as JSON; a browser that
    opens a page without a login is redirected to the login page.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, refuse_socket: RefuseSocket) -> None:
        self.app = app
        self._rules = rules
        self._refuse_socket = refuse_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            refusal = await self._rules.find_refusal(scope)
        except FleetError as error:
            refusal = error
        if refusal is None:
            if scope["type"] == "http" and csrf_of(scope):
                send = _WhileLoggedIn(send, self._rules.logins, login_token(scope))
            with acting_as(caller_of(scope) or ANYONE):
                await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._refuse_socket(WebSocket(scope, receive, send), refusal)
        elif isinstance(refusal, Unauthorized) and _wants_page(scope):
            where = (
                f"{LOGIN_PATH}?next={quote(scope['path'], safe='/')}"
                if scope["path"] != "/"
                else LOGIN_PATH
            )
            await send(
                {
                    "type": "http.response.start",
                    "status": 303,
                    "headers": [(b"location", where.encode())],
                }
            )
            await send({"type": "http.response.body"})
        else:
            await refusal_response(refusal)(scope, receive, send)


class _WhileLoggedIn:
    """ASGI `send` of a stream to a browser, which ends the stream once the browser's login has
    ended. While Redis is unreachable, the stream continues.
    """

    def __init__(self, send: Send, logins: Logins, login: str) -> None:
        self._send = send
        self._logins = logins
        self._login = login

    async def __call__(self, message: Message) -> None:
        if message.get("more_body") and not await self._is_logged_in():
            await self._send({"type": "http.response.body", "body": b""})
            raise ClientDisconnect
        await self._send(message)

    async def _is_logged_in(self) -> bool:
        try:
            return await self._logins.caller_of(self._login) is not None
        except RedisUnreachable:
            return True


def _wants_page(scope: Scope) -> bool:
    """Return True if a person opened the address in a browser, False for a program that calls the
    API.
    """
    if scope["path"] == "/":
        return True
    asks_html = "text/html" in Headers(scope=scope).get("accept", "")
    return (
        scope["method"] == "GET"
        and asks_html
        and not scope["path"].startswith(("/v1/", "/console/"))
    )


def _foreign(headers: Headers) -> str | None:
    """Return why a request counts as cross-site, or None if it does not. Browsers always send
    Origin with changes, programs do not.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return (
            f"{not_listed(origin)} to let them call the API; the console's changes and sockets "
            "come from its own pages only "
            "(a proxy must pass the Host header on unchanged)"
        )
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return "sec-fetch-site: requests from pages of other sites are refused"
    return None


def cookie_name(scope: Scope) -> str:
    return SECURE_COOKIE if scope["scheme"] in ("https", "wss") else COOKIE


def login_token(scope: Scope) -> str:
    """Return the login token in the console's cookie; "" without the cookie."""
    return read_cookie(Headers(scope=scope).get("cookie", ""), cookie_name(scope))


def client_key(scope: Scope) -> str | None:
    """Return the key that the client sent, in the Authorization header or as a WebSocket
    subprotocol, since browsers cannot set headers of a WebSocket; None without a key.
    """
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    for protocol in scope.get("subprotocols", []):
        if str(protocol).startswith(KEY_SUBPROTOCOL_PREFIX):
            return str(protocol).removeprefix(KEY_SUBPROTOCOL_PREFIX)
    return None
