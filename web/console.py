"""The console: one page to talk with the model while its stages show what they do.

Knows stages only as the graph declares them.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from fleet.core.ids import RequestId
from web.connection import send_stream, until_disconnect
from web.console_socket import ConsoleSocket
from web.gateway import Gateway
from web.middleware import COOKIE, cookie_value, same_key
from web.strip import Strip, read_strip

HERE = Path(__file__).parent
MAX_PAGES = 1000
BUSY_S, IDLE_S = 0.25, 1.0
"""How often the strip is read anew, while a request of the page runs and otherwise."""


class Pages:
    """Which request each open page shows. Invariants: at most `MAX_PAGES`, the oldest are forgotten first."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, RequestId | None] = OrderedDict()

    def open(self) -> str:
        page = secrets.token_urlsafe(9)
        self._shown[page] = None
        while len(self._shown) > MAX_PAGES:
            self._shown.popitem(last=False)
        return page

    def show(self, page: str, request_id: RequestId) -> None:
        if page in self._shown:
            self._shown[page] = request_id

    def shown(self, page: str) -> RequestId | None:
        return self._shown.get(page)


class Views:
    """Templates, and static files under addresses that change with their content."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined
        )
        cast("dict[str, object]", self._environment.globals)["static"] = _static_url

    def render(self, name: str, **values: object) -> str:
        return self._environment.get_template(name).render(**values)


class Console:
    def __init__(self, gateway: Gateway, api_key: str | None) -> None:
        self._gateway = gateway
        self._api_key = api_key
        self._pages = Pages()
        self._views = Views()
        self.events = StripEvents(gateway, self._pages, self._views)

    async def page(self, _request: Request) -> Response:
        gateway = self._gateway
        strip = await read_strip(gateway, None)
        html = self._views.render(
            "console.html",
            page=self._pages.open(),
            model=gateway.model,
            graph=gateway.graph,
            voices=gateway.frontend.voices(),
            examples=gateway.frontend.examples(),
            speaks=gateway.speaks,
            rate_hz=gateway.frontend.sample_rate_hz,
            strip=strip,
        )
        return HTMLResponse(html, headers={"cache-control": "no-store"})

    async def login(self, request: Request) -> Response:
        """The page where a browser trades the API key for a cookie that stands for it."""
        if self._api_key is None:
            return RedirectResponse("/", status_code=303)
        wrong = False
        if request.method == "POST":
            async with request.form(max_fields=4, max_files=0) as form:
                given = form.get("key")
            if isinstance(given, str) and same_key(given.strip().encode(), self._api_key):
                answer = RedirectResponse("/", status_code=303)
                secure = request.url.scheme == "https"
                answer.set_cookie(
                    COOKIE, cookie_value(self._api_key), httponly=True, samesite="strict", secure=secure
                )
                return answer
            wrong = True
        html = self._views.render("login.html", model=self._gateway.model, wrong=wrong)
        return HTMLResponse(html, status_code=401 if wrong else 200, headers={"cache-control": "no-store"})

    async def socket(self, websocket: WebSocket) -> None:
        page = websocket.query_params.get("page", "")
        await ConsoleSocket(self._gateway, websocket, lambda request: self._pages.show(page, request)).run()


class StripEvents:
    """GET /console/events?page=: the strip as server-sent HTML, one event per change. Ends when its page goes."""

    def __init__(self, gateway: Gateway, pages: Pages, views: Views) -> None:
        self._gateway = gateway
        self._pages = pages
        self._views = views

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = Request(scope).query_params.get("page", "")
        await until_disconnect(receive, send_stream(send, {}, self._changes(page)))

    async def _changes(self, page: str) -> AsyncIterator[bytes]:
        last = ""
        number = 0
        while not self._gateway.closing.is_set():
            strip = await read_strip(self._gateway, self._pages.shown(page))
            html = self._views.render("strip.html", strip=strip)
            if html != last:
                number += 1
                last = html
                yield _event(number, html)
            await self._pause(strip)

    async def _pause(self, strip: Strip) -> None:
        try:
            await asyncio.wait_for(self._gateway.closing.wait(), BUSY_S if strip.busy else IDLE_S)
        except TimeoutError:
            return


def _event(number: int, html: str) -> bytes:
    lines = [f"data: {line}" for line in html.splitlines() if line.strip()]
    return "\n".join([f"id: {number}", *lines, "", ""]).encode()


def _static_url(name: str) -> str:
    digest = hashlib.sha256((HERE / "static" / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"
