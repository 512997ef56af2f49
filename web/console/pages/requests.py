"""The Answers page: requests, newest first, filtered by the query parameters. Knows no stage by
name.
"""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fleet.core.ids import request_id_of
from fleet.telemetry.trace import STATES, RequestFilter, RequestPage, RequestRow
from web.console.page_context import (
    FilteredContext,
    FilterLink,
    LivePage,
    Query,
    build_path,
    read_filters,
)
from web.fleet_api.routes import read_request_filter
from web.gateway.gateway import Gateway

PATH = "/requests"
FIELDS = ("state", "stage", "worker", "kind", "model", "min_ms", "session", "from", "to", "q")
KINDS = ("text", "speech", "voice", "transcription")
PAGE_SIZE = 50
MAX_SEARCHED = 200
"""Number of the newest requests among which the successor of the shown request is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTableRow:
    """A row of the table of requests. `took_ms` is the duration of the request, None while it runs.
    `first_ms` is the time to the first audio, or to the first text of an answer without audio; None
    without output, or if the clocks disagree. `first_of`: sound or text, which are not compared.
    """

    view: RequestRow
    took_ms: float | None
    first_ms: float | None
    first_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsContext(FilteredContext):
    chips: tuple[FilterLink, ...]
    rows: tuple[RequestTableRow, ...]
    stages: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS


class RequestsPage(LivePage):
    key = active = "requests"
    title = "Answers"
    path = "/requests"
    live = ("trouble", "chips", "rows", "pager")

    def empty(self, query: Query) -> RequestsContext:
        return self._build(query, RequestPage(rows=(), next="", counts={}, now_us=0))

    async def read(self, query: Query) -> RequestsContext:
        """Return the requests that match the filters in `query`. Raises: BadInput if a filter is
        invalid.
        """
        wanted = read_request_filter(read_filters(query, FIELDS))
        found = await self._gateway.client.telemetry.list_requests(
            wanted, before=query.get("before", ""), limit=PAGE_SIZE
        )
        return self._build(query, found)

    def _build(self, query: Query, found: RequestPage) -> RequestsContext:
        wanted = read_filters(query, FIELDS)
        before, counts = query.get("before", ""), {"": sum(found.counts.values()), **found.counts}
        chips = (
            FilterLink(
                name=state,
                count=counts.get(state, 0),
                path=build_path(PATH, {**wanted, "state": state}),
                chosen=wanted["state"] == state,
            )
            for state in ("", *STATES)
        )
        return RequestsContext(
            stream_query={**wanted, "before": before},
            wanted=wanted,
            chips=tuple(chips),
            rows=tuple(build_row(row, self._gateway) for row in found.rows),
            older=build_path(PATH, {**wanted, "before": found.next}) if found.next else "",
            newest=build_path(PATH, wanted) if before else "",
            stages=tuple(stage.name for stage in self._gateway.graph.stages),
        )

    async def redirect_to_older(self, request: Request) -> Response:
        """Redirect to the page of the next older request, or to the list of requests if there is
        none.
        """
        here = request_id_of(str(request.path_params["id"]))
        found = await self._gateway.client.telemetry.list_requests(
            RequestFilter(), before=here, limit=1
        )
        return _redirect(found.rows[0].id if found.rows else "")

    async def redirect_to_newer(self, request: Request) -> Response:
        here = request_id_of(str(request.path_params["id"]))
        found = await self._gateway.client.telemetry.list_requests(
            RequestFilter(), limit=MAX_SEARCHED
        )
        ids = [str(row.id) for row in found.rows]
        return _redirect(ids[ids.index(here) - 1] if here in ids[1:] else "")


def _redirect(request_id: str) -> Response:
    return RedirectResponse(f"{PATH}/{request_id}" if request_id else PATH, status_code=303)


def build_row(row: RequestRow, gateway: Gateway) -> RequestTableRow:
    sound_us = row.first_us.get(gateway.edges.audio, 0) if gateway.edges.audio is not None else 0
    first_us = sound_us or row.first_us.get(gateway.edges.text, 0)
    return RequestTableRow(
        view=row,
        took_ms=(row.ended_us - row.created_us) / 1000 if row.ended_us else None,
        first_ms=(first_us - row.created_us) / 1000 if first_us >= row.created_us else None,
        first_of="sound" if sound_us else "text",
    )
