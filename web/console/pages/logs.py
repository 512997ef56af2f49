"""The Logs page: log lines of all processes, which can be searched and followed live. Knows no
process by name.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError
from fleet.telemetry.views import LEVELS, LogLine, LogQuery
from web.console.live_pages import format_message
from web.console.page_context import FilteredContext, LivePage, Query, build_path, read_filters
from web.console.refresh import wait_for_any
from web.console.templating import Templates
from web.fleet_api.routes import read_log_query
from web.gateway.gateway import Gateway
from web.http.disconnect import until_disconnect
from web.http.sse import send_stream

PATH = "/logs"
FIELDS = ("q", "level", "process", "worker", "request")
PAGE_SIZE = 200
GATHER_S = 0.25
"""Seconds for which new lines are collected before they are sent together."""
RETRY_S, LONG_S = 1.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsContext(FilteredContext):
    """Data of the Logs page. `follows` is True if new lines are appended live, which pages of older
    lines do not do. `dropped` is the number of lines lost because Redis was too slow or away.
    """

    lines: tuple[LogLine, ...] = ()
    follows: bool = True
    dropped: int = 0
    levels: tuple[str, ...] = LEVELS


class LogsPage(LivePage):
    key = active = "logs"
    path = "/logs"
    live = ()

    def empty(self, query: Query) -> LogsContext:
        wanted = read_filters(query, FIELDS)
        return LogsContext(stream_query=wanted, wanted=wanted, follows=False)

    async def read(self, query: Query) -> LogsContext:
        """Return the log lines that match the filters in `query`. Raises: BadInput if a filter is
        invalid.
        """
        wanted, before = read_filters(query, FIELDS), query.get("before", "")
        page = await self._gateway.client.telemetry.logs(
            read_log_query(wanted), before=before, limit=PAGE_SIZE
        )
        return replace(
            self.empty(query),
            stream_query={**wanted, "after": page.newest or "0-0"},
            lines=page.lines,
            older=build_path(PATH, {**wanted, "before": page.next}) if page.next else "",
            newest=build_path(PATH, wanted) if before else "",
            follows=not before,
            dropped=page.dropped,
        )


class LogStream:
    """`GET /console/live/logs`: new log lines as server-sent events. The id of an event is the log
    id of its newest line, so that a reconnecting page continues where it was.
    """

    def __init__(self, gateway: Gateway, templates: Templates) -> None:
        self._gateway = gateway
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        query = read_log_query(read_filters(request.query_params, FIELDS))
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        await until_disconnect(receive, send_stream(send, {}, self._messages(query, after)))

    async def _messages(self, query: LogQuery, after: str) -> AsyncIterator[bytes]:
        yield self._trouble("", after)
        while not self._gateway.closing.is_set():
            groups = self._group_lines(query, after)
            try:
                async for lines in groups:
                    after = lines[0].id
                    html = self._templates.render("parts/lines.html", lines=lines)
                    yield format_message(after, {"lines": html}, swap="afterbegin")
            except FleetError as error:
                yield self._trouble(error.message, after)
                await wait_for_any(RETRY_S, self._gateway.closing)
                yield self._trouble("", after)
            finally:
                await groups.aclose()

    async def _group_lines(
        self, query: LogQuery, after: str
    ) -> AsyncGenerator[list[LogLine], None]:
        """Yield the lines after the log id `after` in groups, the newest line of a group first,
        until the gateway closes.
        """
        lines: asyncio.Queue[LogLine] = asyncio.Queue(maxsize=PAGE_SIZE)
        arrived = asyncio.Event()
        reading = asyncio.create_task(self._read(query, after, lines, arrived))
        reading.add_done_callback(lambda _: arrived.set())
        try:
            while not self._gateway.closing.is_set():
                if reading.done() and lines.empty():
                    reading.result()
                    return
                await wait_for_any(LONG_S, arrived, self._gateway.closing)
                await wait_for_any(GATHER_S, self._gateway.closing)
                arrived.clear()
                if group := [lines.get_nowait() for _ in range(lines.qsize())]:
                    yield group[::-1]
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _read(
        self, query: LogQuery, after: str, lines: "asyncio.Queue[LogLine]", arrived: asyncio.Event
    ) -> None:
        async for line in self._gateway.client.telemetry.follow_logs(query, after=after):
            await lines.put(line)
            arrived.set()

    def _trouble(self, text: str, last_id: str) -> bytes:
        return format_message(
            last_id or "0-0",
            {"trouble": self._templates.render("parts/trouble.html", message=text)},
        )
