"""Pages that follow the fleet: one server-sent stream each, whose messages replace what has changed. Knows no page's content.

The ids of a stream are those of the fleet's events. A page that comes back is sent whole, so whatever it missed, it shows.
"""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError, NotFound
from web.gateway.gateway import Gateway
from web.http.disconnect import until_disconnect
from web.http.guard import csrf_of
from web.http.sse import send_stream
from web.pages.feed import Feed
from web.pages.frame import Frame, Query
from web.pages.login import NO_STORE
from web.pages.shell import Shell, origin_of, shell_of
from web.pages.views import Views

WHOLE = "page"
"""The block, and the id of its element, that holds everything which lives."""


class LivePage(Protocol):
    """`live` names the blocks that are sent again when they change; each is one element whose id is the block's name."""

    @property
    def key(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def active(self) -> str: ...
    @property
    def live(self) -> Sequence[str]: ...

    async def read(self, query: Query) -> Frame:
        """Raises: FleetError, which the page then shows."""
        ...

    def empty(self, query: Query) -> Frame:
        """What is shown where nothing can be read."""
        ...


class LivePages:
    """Serves each page whole at its own path, and the streams of all."""

    def __init__(self, gateway: Gateway, views: Views, pages: Sequence[LivePage]) -> None:
        self._gateway = gateway
        self._views = views
        self._feed = Feed(gateway)
        self._pages = {page.key: page for page in pages}

    def whole(self, key: str) -> Callable[[Request], Awaitable[Response]]:
        page = self._pages[key]

        async def serve(request: Request) -> Response:
            frame = await self._frame(page, {**request.query_params, **request.path_params}, None)
            html = self._views.render(page.template, page=frame, shell=self._shell(page, request))
            return HTMLResponse(html, status_code=frame.status, headers=NO_STORE)

        return serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        page = self._pages.get(str(request.path_params["key"]))
        if page is None:
            await Response(status_code=404)(scope, receive, send)
            return
        changes = self._changes(page, request)
        await until_disconnect(receive, send_stream(send, {}, changes))

    async def _changes(self, page: LivePage, request: Request) -> AsyncIterator[bytes]:
        """The whole page first, then each block that differs from what was sent last."""
        query, known = dict(request.query_params), request.headers.get("last-event-id", "")
        sent: dict[str, str] = {}
        frame: Frame | None = None
        async with aclosing(self._feed.beats()) as beats:
            async for mark in beats:
                frame = await self._frame(page, query, frame)
                blocks = {name: self._block(page, name, frame, request) for name in page.live}
                changed = {name: html for name, html in blocks.items() if sent.get(name) != html}
                if not sent:
                    changed = {WHOLE: self._block(page, WHOLE, frame, request)}
                sent = blocks
                if changed:
                    yield message(mark or known or "0-0", changed)

    async def _frame(self, page: LivePage, query: Query, last: Frame | None) -> Frame:
        """What can be read now; else what was shown last, or nothing, under the reason."""
        try:
            return await page.read(query)
        except FleetError as error:
            shown = last or dataclasses.replace(page.empty(query), known=isinstance(error, NotFound))
            return dataclasses.replace(shown, trouble=error.message, remedy="", status=error.status)

    def _block(self, page: LivePage, name: str, frame: Frame, request: Request) -> str:
        return self._views.render_block(page.template, name, page=frame, shell=self._shell(page, request))

    def _shell(self, page: LivePage, request: Request) -> Shell:
        return shell_of(self._gateway, csrf_of(request.scope), page.active, origin_of(request))


def message(mark: str, blocks: Mapping[str, str], swap: str = "outerMorph") -> bytes:
    """One event that puts each block in the place of the element whose id is the block's name."""
    html = "\n".join(
        f'<hx-partial hx-target="#{name}" hx-swap="{swap}">\n{block}\n</hx-partial>' for name, block in blocks.items()
    )
    lines = [f"data: {line}" for line in html.splitlines() if line.strip()]
    return "\n".join([f"id: {mark}", *lines, "", ""]).encode()
