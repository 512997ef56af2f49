"""The Voice page: to talk with the model while its stages show what they do.

Knows stages only as the graph declares them.
"""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.ids import RequestId
from web.gateway.gateway import Gateway
from web.http.disconnect import until_disconnect
from web.http.guard import csrf_of
from web.http.sse import send_stream
from web.pages.shell import origin_of, shell_of
from web.pages.views import Views
from web.strip import Strip, read_strip

BUSY_S, IDLE_S = 0.25, 1.0
"""Pause between two readings of the strip: while the request that it shows runs, and otherwise."""


class Console:
    def __init__(self, gateway: Gateway, views: Views) -> None:
        self._gateway = gateway
        self._views = views
        self.events = StripEvents(gateway, views)

    async def page(self, request: Request) -> Response:
        gateway = self._gateway
        strip = await read_strip(gateway, None)
        html = self._views.render(
            "voice.html",
            shell=shell_of(gateway, csrf_of(request.scope), "voice", origin_of(request)),
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
    """GET /console/events?request=: the strip as server-sent HTML, one event per change.

    The address names the request to show, so any gateway can continue a stream that another one began.
    """

    def __init__(self, gateway: Gateway, views: Views) -> None:
        self._gateway = gateway
        self._views = views

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = Request(scope).query_params.get("request", "")
        await until_disconnect(receive, send_stream(send, {}, self._changes(RequestId(shown) if shown else None)))

    async def _changes(self, shown: RequestId | None) -> AsyncIterator[bytes]:
        last = ""
        number = 0
        while not self._gateway.closing.is_set():
            strip = await read_strip(self._gateway, shown)
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
