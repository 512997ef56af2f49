"""Live pages: HTML pages, each with a server-sent stream whose messages replace the blocks that
have changed.

The ids of messages are the ids of the fleet's events. After a reconnection the whole page is sent
again, with everything that was missed.
"""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError, NotFound
from web.console.login import NO_STORE
from web.console.page_context import LIVE, LivePage, PageContext, Query, build_path
from web.console.refresh import RefreshTimer
from web.console.shell import Shell, build_shell, find_origin
from web.console.templating import Templates
from web.gateway.gateway import Gateway
from web.http.disconnect import until_disconnect
from web.http.errors import status_of
from web.http.guard import csrf_of
from web.http.sse import send_stream

WHOLE = "page"
"""Name of the template block, and id of its element, that contains every live block of a page."""


class LivePages:
    """Routes of all live pages: each page at its own path, and its stream."""

    def __init__(self, gateway: Gateway, templates: Templates, pages: Sequence[LivePage]) -> None:
        self._gateway = gateway
        self._templates = templates
        self._refresh = RefreshTimer(gateway)
        self._pages = {page.key: page for page in pages}

    def routes(self) -> list[Route]:
        return [Route(page.path, self._serve(page)) for page in self._pages.values()]

    def _serve(self, page: LivePage) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            context = await self._read(page, {**request.query_params, **request.path_params}, None)
            html = self._templates.render(
                f"{page.key}.html",
                page=context,
                shell=self._shell(page, request),
                title=request.path_params.get("id", page.title or page.key.capitalize()),
                stream=build_path(LIVE + page.key, context.stream_query),
            )
            return HTMLResponse(html, status_code=context.status, headers=NO_STORE)

        return serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        page = self._pages.get(str(request.path_params["key"]))
        if page is None:
            await Response(status_code=404)(scope, receive, send)
        else:
            await until_disconnect(receive, send_stream(send, {}, self._changes(page, request)))

    async def _changes(self, page: LivePage, request: Request) -> AsyncIterator[bytes]:
        """Yield the messages of a page's stream: the whole page, then each block whenever its HTML
        has changed.
        """
        query, last_id = dict(request.query_params), request.headers.get("last-event-id", "")
        sent: dict[str, str] = {}
        context: PageContext | None = None
        async with aclosing(self._refresh.wait_for_changes()) as event_ids:
            async for event_id in event_ids:
                context = await self._read(page, query, context)
                blocks = {name: self._block(page, name, context, request) for name in page.live}
                changed = {name: html for name, html in blocks.items() if sent.get(name) != html}
                if not sent:
                    changed = {WHOLE: self._block(page, WHOLE, context, request)}
                sent = blocks
                if changed:
                    yield format_message(event_id or last_id or "0-0", changed)

    async def _read(self, page: LivePage, query: Query, last: PageContext | None) -> PageContext:
        """Read a page's context. On an error, return the context of the previous reading (`last`),
        or an empty one if `last` is None, with the error as its trouble. A problem of Redis
        replaces the page's own trouble.
        """
        try:
            shown = await page.read(query)
            if (
                shown.status == HTTPStatus.NOT_FOUND
                and last is not None
                and last.status == HTTPStatus.OK
            ):
                # What the page shows expired while it was open.
                shown = dataclasses.replace(
                    last, trouble=shown.trouble, remedy="", status=shown.status
                )
            trouble = self._gateway.client.telemetry.redis_trouble()
            return dataclasses.replace(shown, trouble=trouble, remedy="") if trouble else shown
        except FleetError as error:
            shown = last or dataclasses.replace(
                page.empty(query), known=isinstance(error, NotFound)
            )
            return dataclasses.replace(
                shown, trouble=error.message, remedy="", status=status_of(error)
            )

    def _block(self, page: LivePage, name: str, context: PageContext, request: Request) -> str:
        return self._templates.render_block(
            f"{page.key}.html", name, page=context, shell=self._shell(page, request)
        )

    def _shell(self, page: LivePage, request: Request) -> Shell:
        return build_shell(self._gateway, csrf_of(request.scope), page.active, find_origin(request))


def format_message(event_id: str, blocks: Mapping[str, str], swap: str = "outerMorph") -> bytes:
    """Return a server-sent event that replaces page elements. `blocks` maps ids of elements to
    their HTML, whose empty lines are left out; `swap` is htmx's way of replacing them.
    """
    html = "\n".join(
        f'<hx-partial hx-target="#{name}" hx-swap="{swap}">\n{block}\n</hx-partial>'
        for name, block in blocks.items()
    )
    lines = [f"data: {line}" for line in html.splitlines() if line.strip()]
    return "\n".join([f"id: {event_id}", *lines, "", ""]).encode()
