"""Requests: newest first, narrowed by filters that are the page's address, in pages by key. Knows no stage by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fleet.core.errors import BadInput
from fleet.core.request_trace import STATES, RequestFilter, RequestPage, RequestRow
from web.console.page_context import PageContext, Query, assign_colours, build_path, stream_path
from web.gateway.gateway import Gateway

PATH = "/requests"
FIELDS = ("state", "stage", "worker", "kind", "model", "min_ms", "q")
KINDS = ("text", "speech", "voice", "transcription")
PAGE_SIZE = 50
NEIGHBOURS = 200
"""How far back the way from a request to the newer one next to it is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFilter:
    """One state to choose. `count` is that of the whole index."""

    state: str
    count: int
    path: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCell:
    stage: str
    colour: int
    state: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTableRow:
    """Units: `took_ms` until the end, None while it runs; `first_ms` until the first sound, or else the first word,
    None where there is none, or clocks disagree.
    """

    id: str
    state: str
    kind: str
    created_us: int
    took_ms: float | None
    first_ms: float | None
    error: str
    tasks: tuple[TaskCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsContext(PageContext):
    """`wanted` holds every filter, "" where it is not set. `older`, `newest`: addresses, "" where there is nothing."""

    wanted: dict[str, str]
    chips: tuple[StateFilter, ...]
    rows: tuple[RequestTableRow, ...]
    older: str
    newest: str
    clear: str
    stages: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS

    @property
    def filtered(self) -> bool:
        return any(self.wanted.values())


class RequestsPage:
    key = active = "requests"
    path = "/requests"
    template = "requests.html"
    live = ("trouble", "chips", "rows", "pager")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._colours = assign_colours(gateway.graph)

    def empty(self, query: Query) -> RequestsContext:
        return self._build(query, RequestPage(rows=(), next="", counts={}, now_us=0))

    async def read(self, query: Query) -> RequestsContext:
        """Raises: BadInput where a filter means nothing."""
        found = await self._gateway.client.telemetry.list_requests(
            parse_filter(query), before=query.get("before", ""), limit=PAGE_SIZE
        )
        return self._build(query, found)

    def _build(self, query: Query, found: RequestPage) -> RequestsContext:
        wanted = {name: query.get(name, "").strip() for name in FIELDS}
        before = query.get("before", "")
        return RequestsContext(
            title="Requests",
            stream=stream_path(self.key, {**wanted, "before": before}),
            wanted=wanted,
            chips=self._chips(wanted, found.counts),
            rows=tuple(build_row(row, self._colours, self._gateway) for row in found.rows),
            older=build_path(PATH, {**wanted, "before": found.next}) if found.next else "",
            newest=build_path(PATH, wanted) if before else "",
            clear=PATH,
            stages=tuple(self._colours),
        )

    @staticmethod
    def _chips(wanted: Mapping[str, str], counts: Mapping[str, int]) -> tuple[StateFilter, ...]:
        every = StateFilter(
            state="",
            count=sum(counts.values()),
            path=build_path(PATH, {**wanted, "state": ""}),
            chosen=not wanted["state"],
        )
        return (
            every,
            *(
                StateFilter(
                    state=state,
                    count=counts.get(state, 0),
                    path=build_path(PATH, {**wanted, "state": state}),
                    chosen=wanted["state"] == state,
                )
                for state in STATES
            ),
        )

    async def redirect_to_older(self, request: Request) -> Response:
        """The request before this one; the list where there is none."""
        here = str(request.path_params["id"])
        found = await self._gateway.client.telemetry.list_requests(RequestFilter(), before=here, limit=1)
        return _to(found.rows[0].id if found.rows else "")

    async def redirect_to_newer(self, request: Request) -> Response:
        here = str(request.path_params["id"])
        found = await self._gateway.client.telemetry.list_requests(RequestFilter(), limit=NEIGHBOURS)
        ids = [str(row.id) for row in found.rows]
        return _to(ids[ids.index(here) - 1] if here in ids[1:] else "")


def _to(request_id: str) -> Response:
    return RedirectResponse(f"{PATH}/{request_id}" if request_id else PATH, status_code=303)


def parse_filter(query: Query) -> RequestFilter:
    """Raises: BadInput naming the field."""
    given = {name: query.get(name, "").strip() for name in FIELDS}
    if given["state"] and given["state"] not in STATES:
        raise BadInput(f"state: {given['state'][:40]!r} is none of {', '.join(STATES)}", param="state")
    digits = given["min_ms"]
    if digits and not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise BadInput(f"min_ms: {digits[:40]!r} is not a whole number of milliseconds", param="min_ms")
    return RequestFilter(
        state=given["state"],
        stage=given["stage"],
        worker=given["worker"],
        kind=given["kind"],
        model=given["model"],
        min_ms=int(digits or 0),
        text=given["q"],
    )


def build_row(row: RequestRow, colour_of: Mapping[str, int], gateway: Gateway) -> RequestTableRow:
    first_us = row.first_us.get(gateway.edges.audio or gateway.edges.text) or row.first_us.get(gateway.edges.text, 0)
    return RequestTableRow(
        id=row.id,
        state=row.state,
        kind=row.kind,
        created_us=row.created_us,
        took_ms=(row.ended_us - row.created_us) / 1000 if row.ended_us else None,
        first_ms=(first_us - row.created_us) / 1000 if first_us >= row.created_us else None,
        error=row.error,
        tasks=tuple(
            TaskCell(stage=task.stage, colour=colour_of.get(task.stage, 0), state=task.state, worker=task.worker)
            for task in row.tasks
        ),
    )
