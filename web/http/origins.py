"""Cross-origin use of the API from browsers (CORS): allowed origins, and the CORS headers of
responses.

Credentials are never allowed: a page of another origin sends the API key and cannot use the
console's cookie. Knows no route.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fleet.config.safety import find_any_origin_refusal
from fleet.config.schema import WebConfig
from fleet.config.values import ANY_ORIGIN
from fleet.core.errors import BadInput, ConfigError, quoted
from web.http.errors import Forbidden, refusal_response
from web.http.protocol.abuse import TimedAbuseLog

API = ("/v1/", "/health", "/ready", "/metrics", "/openapi.json")
"""Paths that other origins may be allowed to call; the console's pages are not among them."""
CALLS_PATH = "/v1/realtime/calls"
"""Path that pages of every origin may call, with a client secret in place of the API key."""
METHODS = ("GET", "HEAD", "POST", "DELETE")
EXPOSED = (ANY_ORIGIN, "x-request-id", "retry-after", "location")
"""Response headers that pages of other origins may read: all. The wildcard is followed by three
headers that SDKs read, for browsers that do not support it.
"""
PREFLIGHT_MAX_AGE_S = 600


class AllowedOrigins:
    """Origins whose pages may call the API, from `web.allowed_origins`. Raises: ConfigError if any
    origin is allowed and no API key is set.
    """

    def __init__(self, web: WebConfig, *, has_key: bool) -> None:
        self.listed = web.allowed_origins
        if not has_key and (refusal := find_any_origin_refusal(web)):
            raise ConfigError(refusal, param="web.allowed_origins")

    def allow(self, scope: Scope) -> bool:
        """Return True if the request or WebSocket is for the API and comes from a page of an
        allowed origin.
        """
        origin = Headers(scope=scope).get("origin")
        return (
            origin is not None
            and scope["path"].startswith(API)
            and (origin in self.listed or ANY_ORIGIN in self.listed)
        )


def not_listed(origin: str) -> str:
    return (
        f"origin: pages of {quoted(origin)} may not use this gateway; list it in "
        "web.allowed_origins"
    )


class Cors(CORSMiddleware):
    """Middleware that adds CORS headers to responses of the API, also to refusals. A refused
    preflight gets an error in the API's shape.
    """

    def __init__(self, app: ASGIApp, origins: AllowedOrigins, lines: TimedAbuseLog) -> None:
        self._lines = lines
        super().__init__(
            app,
            allow_origins=origins.listed,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_MAX_AGE_S,
        )
        self._calls = CORSMiddleware(
            app,
            allow_origins=(ANY_ORIGIN,),
            allow_methods=("POST",),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_MAX_AGE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == CALLS_PATH:
            await self._calls(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(API):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        origin = request_headers["origin"]
        method = request_headers["access-control-request-method"]
        if not self.is_allowed_origin(origin):
            refusal = Forbidden(not_listed(origin), param="origin")
        elif method not in METHODS:
            param = "access-control-request-method"
            message = (
                f"{param}: no route takes {quoted(method)}; use {', '.join(METHODS[:-1])} "
                f"or {METHODS[-1]}"
            )
            refusal = BadInput(message, param=param)
        else:
            return super().preflight_response(request_headers)
        self._lines.note("refused preflights", quoted(origin), refusal.message)
        return refusal_response(refusal, {"vary": "Origin"})
