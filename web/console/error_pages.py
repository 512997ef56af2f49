"""Error pages: shown to a browser in place of a JSON error, with the reason and links to continue.
Knows no route.
"""

from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from web.console.login import NO_STORE
from web.console.shell import build_shell, find_origin
from web.console.templating import Templates
from web.gateway.gateway import Gateway
from web.http.errors import ErrorEnvelope

API_PATHS = ("/v1/", "/health", "/ready", "/metrics", "/openapi.json")
TITLES = {
    404: "Page not found",
    405: "Method not allowed",
    500: "Internal server error",
    503: "Not available now",
}
_decoder = msgspec.json.Decoder(ErrorEnvelope)


class ErrorPages:
    """Middleware that replaces JSON errors by pages if a person opened the address in a browser.
    Programs and the console's buttons receive the JSON.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, templates: Templates) -> None:
        self.app = app
        self._gateway = gateway
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(
            scope, receive, _ErrorPageSender(self, scope, send) if wants_page(scope) else send
        )

    def render(self, scope: Scope, status: int, message: str, request_id: str) -> bytes:
        """Return an error page as HTML. The page has no CSRF token and no logout, since browsers
        that are not logged in receive it too.
        """
        request = Request(scope)
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        html = self._templates.render(
            "error.html",
            shell=build_shell(self._gateway, "", "", find_origin(request)),
            title=TITLES.get(status, HTTPStatus(status).phrase),
            status=status,
            message=message,
            retry_path=address
            if scope["method"] == "GET" and status >= HTTPStatus.INTERNAL_SERVER_ERROR
            else "",
            request_id=request_id if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "",
        )
        return html.encode()


def wants_page(scope: Scope) -> bool:
    """Return True if a person opened the address in a browser, False for programs and the console's
    buttons and streams.
    """
    if scope["type"] != "http" or scope["path"].startswith(API_PATHS):
        return False
    headers = Headers(scope=scope)
    return "text/html" in headers.get("accept", "") and "hx-request" not in headers


class _ErrorPageSender:
    """ASGI `send` that collects the body of a JSON error and sends an error page instead. Other
    responses pass unchanged.
    """

    def __init__(self, pages: ErrorPages, scope: Scope, send: Send) -> None:
        self._pages = pages
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_error(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        try:
            error = _decoder.decode(self._body).error
        except msgspec.MsgspecError:
            body = self._body
        else:
            headers = MutableHeaders(raw=start["headers"])
            body = self._pages.render(
                self._scope, start["status"], error.message, headers.get("x-request-id", "")
            )
            headers.update(
                {
                    "content-type": "text/html; charset=utf-8",
                    "content-length": str(len(body)),
                    **NO_STORE,
                }
            )
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def _is_error(start: Message) -> bool:
    """Return True for a JSON error that a page may replace. A refused Host header keeps its JSON,
    since a page of another site may have sent the request.
    """
    status = start["status"]
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return (
        status >= HTTPStatus.BAD_REQUEST
        and status != HTTPStatus.MISDIRECTED_REQUEST
        and kind.startswith("application/json")
    )
