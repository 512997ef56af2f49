"""The Answers page: requests, newest or slowest first, filtered by the query parameters. Knows no
stage by name.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fleet.core.clock import now_us
from fleet.core.errors import BadInput
from fleet.core.ids import request_id_of
from fleet.telemetry.trace import STATES, RequestFilter, RequestPage, RequestRow
from web.console.cohorts import Cohort, find_cohort
from web.console.page_context import (
    FilteredContext,
    FilterLink,
    LivePage,
    Query,
    build_path,
    read_filters,
)
from web.console.verdict import MAX_FIRST_MS
from web.fleet_api.answer_texts import AnswerTexts
from web.fleet_api.routes import read_request_filter
from web.gateway.gateway import Gateway
from web.http.query_params import choice_param

PATH = "/requests"
FIELDS = (
    *("state", "stage", "worker", "kind", "model", "min_ms", "session", "from", "to", "q"),
    *("words", "order"),
)
Order = Literal["slowest"]
ORDERS: tuple[Order, ...] = ("slowest",)
KINDS = ("text", "speech", "voice", "transcription")
PAGE_SIZE = 50
MAX_RANKED = 200
"""Number of the newest matching requests of which the slowest are listed."""
MAX_WORDS_CHARS = 200
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
    """Data of the Answers page. `cohort`: what the slow answers of the list have in common, None if
    nothing is known. `note`: how far the list was searched.
    """

    chips: tuple[FilterLink, ...]
    rows: tuple[RequestTableRow, ...]
    stages: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS
    cohort: Cohort | None = None
    note: str = ""


class RequestsPage(LivePage):
    key = active = "requests"
    title = "Answers"
    path = "/requests"
    live = ("trouble", "chips", "rows", "pager")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._texts = AnswerTexts(gateway)

    def empty(self, query: Query) -> RequestsContext:
        return self._build(query, RequestPage(rows=(), next="", counts={}, now_us=0))

    async def read(self, query: Query) -> RequestsContext:
        """Return the requests that match the filters in `query`. Raises: BadInput if a filter is
        invalid.
        """
        filters = read_filters(query, FIELDS)
        wanted = read_request_filter(filters)
        is_slowest = choice_param(filters, "order", ORDERS) == "slowest"
        if len(filters["words"]) > MAX_WORDS_CHARS:
            message = f"words: at most {MAX_WORDS_CHARS} characters are searched; send fewer"
            raise BadInput(message, param="words")
        note = ""
        if filters["words"]:
            found, note = await self._search(filters["words"], wanted)
        else:
            limit, before = (MAX_RANKED, "") if is_slowest else (PAGE_SIZE, query.get("before", ""))
            telemetry = self._gateway.client.telemetry
            found = await telemetry.list_requests(wanted, before=before, limit=limit)
            if is_slowest and found.next:
                note = f"The slowest of the newest {MAX_RANKED} that match."
        rows = [build_row(row, self._gateway) for row in found.rows]
        cohort = find_cohort(*divide(rows))
        if is_slowest:
            rows.sort(key=lambda row: -(row.first_ms or 0.0))
        if is_slowest or filters["words"]:
            found = msgspec.structs.replace(found, next="")
        shown = tuple(rows[:PAGE_SIZE])
        return replace(self._build(query, found), rows=shown, cohort=cohort, note=note)

    async def _search(self, words: str, wanted: RequestFilter) -> tuple[RequestPage, str]:
        """Return the answers with these words, and how far they were searched."""
        found = await self._texts.find(words, msgspec.structs.replace(wanted, state=""))
        counts = Counter(row.state for row in found.rows)
        rows = [row for row in found.rows if wanted.state in ("", row.state)]
        note = f"Searched {found.num_searched} answers, stored and kept"
        note += "." if found.is_all else "; older ones were not searched."
        if len(rows) > PAGE_SIZE:
            note += f" {PAGE_SIZE} of {len(rows)} are shown."
        page = RequestPage(
            rows=tuple(rows),
            next="",
            counts=dict(counts),
            counts_all=found.is_all,
            now_us=now_us(),
        )
        return page, note

    def _build(self, query: Query, found: RequestPage) -> RequestsContext:
        wanted = read_filters(query, FIELDS)
        before, counts = query.get("before", ""), {"": sum(found.counts.values()), **found.counts}
        chips = (
            FilterLink(
                name=state,
                count=counts.get(state, 0),
                path=build_path(PATH, {**wanted, "state": state}),
                chosen=wanted["state"] == state,
                is_least=not found.counts_all,
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


def divide(rows: Sequence[RequestTableRow]) -> tuple[list[RequestRow], list[RequestRow]]:
    """Return the slow answers of a list, and the others of which the first output is known."""
    known = [(row.view, row.first_ms) for row in rows if row.first_ms is not None]
    slow = [view for view, first_ms in known if first_ms > MAX_FIRST_MS]
    return slow, [view for view, first_ms in known if first_ms <= MAX_FIRST_MS]


def build_row(row: RequestRow, gateway: Gateway) -> RequestTableRow:
    sound_us = row.first_us.get(gateway.edges.audio, 0) if gateway.edges.audio is not None else 0
    first_us = sound_us or row.first_us.get(gateway.edges.text, 0)
    return RequestTableRow(
        view=row,
        took_ms=(row.ended_us - row.created_us) / 1000 if row.ended_us else None,
        first_ms=(first_us - row.created_us) / 1000 if first_us >= row.created_us else None,
        first_of="sound" if sound_us else "text",
    )
