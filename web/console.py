"""The Voice page: to talk with the model while its stages show what they do.

Knows stages only as the graph declares them.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.ids import RequestId
from web.connection import send_stream, until_disconnect
from web.gateway import Gateway
from web.pages.shell import shell_of
from web.pages.views import Views
from web.strip import Strip, read_strip

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


class Console:
    def __init__(self, gateway: Gateway, api_key: str | None, views: Views, pages: Pages) -> None:
        self._gateway = gateway
        self._api_key = api_key
        self._pages = pages
        self._views = views
        self.events = StripEvents(gateway, pages, views)

    async def page(self, _request: Request) -> Response:
        gateway = self._gateway
        strip = await read_strip(gateway, None)
        html = self._views.render(
            "voice.html",
            shell=shell_of(gateway, self._api_key, "voice"),
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
