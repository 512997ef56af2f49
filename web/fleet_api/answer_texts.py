"""Search in the texts of answers: the newest that are stored, and those that this host keeps.

Texts of answers that have ended are remembered, since an open page is read every two seconds.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.core.clock import now_us
from fleet.core.errors import NotFound
from fleet.core.ids import CLIENT, RequestId
from fleet.telemetry.trace import LIVE_STATES, RequestFilter, RequestRow, TaskBrief, matches
from web.fleet_api.request_detail import RequestDetail, read_record, read_request_detail
from web.gateway.gateway import Gateway

MAX_SEARCHED = 200
"""Number of stored answers, and of kept ones, that one search reads."""
MAX_KNOWN_CHARS = 8_000_000
AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAnswers:
    """Answers with the words, newest first. `num_searched` answers were read; `is_all` is False if
    older ones match the filter and were not read.
    """

    rows: tuple[RequestRow, ...]
    num_searched: int
    is_all: bool


class AnswerTexts:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: OrderedDict[RequestId, str] = OrderedDict()
        self._kept: dict[RequestId, RequestRow] = {}
        self._num_chars = 0

    async def find(self, words: str, wanted: RequestFilter) -> FoundAnswers:
        """Search prompts and answers for a phrase, whatever its case. `wanted`: filter of the
        answers to search. Raises: BadInput, RedisUnreachable.
        """
        telemetry, phrase = self._gateway.client.telemetry, " ".join(words.casefold().split())
        page = await telemetry.list_requests(wanted, limit=MAX_SEARCHED)
        stored = {row.id for row in page.rows}
        newest = await self._gateway.history.newest(MAX_SEARCHED)
        kept = [one.request for one in newest if one.request not in stored]
        texts = await self._read_all([*page.rows, *kept])
        rows = [*page.rows, *(row for one in kept if (row := self._kept.get(one)) is not None)]
        found = (
            row
            for row in rows
            if phrase in texts.get(row.id, "")
            and (row.id in stored or matches(row, wanted, now_us()))
        )
        return FoundAnswers(
            rows=tuple(sorted(found, key=lambda row: row.id, reverse=True)),
            num_searched=len(texts),
            is_all=not page.next and len(newest) < MAX_SEARCHED,
        )

    async def _read_all(self, wanted: Sequence[RequestRow | RequestId]) -> dict[RequestId, str]:
        texts: dict[RequestId, str] = {}
        for start in range(0, len(wanted), AT_ONCE):
            some = wanted[start : start + AT_ONCE]
            ids = [one.id if isinstance(one, RequestRow) else one for one in some]
            texts |= zip(ids, await asyncio.gather(*map(self._read, some)), strict=True)
        return texts

    async def _read(self, wanted: RequestRow | RequestId) -> str:
        is_row = isinstance(wanted, RequestRow)
        request = wanted.id if is_row else wanted
        if request in self._known and (is_row or request in self._kept):
            self._known.move_to_end(request)
            return self._known[request]
        try:
            if is_row:
                detail = await read_request_detail(self._gateway, request)
            else:
                detail = (await read_record(self._gateway, request)).detail
                self._kept[request] = row_of(detail)
        except NotFound:
            return ""
        text = " ".join(f"{detail.prompt}\n{detail.answer}".casefold().split())
        if detail.state not in LIVE_STATES:
            self._remember(request, text)
        return text

    def _remember(self, request: RequestId, text: str) -> None:
        self._num_chars += len(text) - len(self._known.get(request, ""))
        self._known[request] = text
        while self._num_chars > MAX_KNOWN_CHARS:
            oldest, dropped = self._known.popitem(last=False)
            self._num_chars -= len(dropped)
            self._kept.pop(oldest, None)


def row_of(detail: RequestDetail) -> RequestRow:
    """Return the description of an answer in a list."""
    return RequestRow(
        id=detail.id,
        state=detail.state,
        kind=detail.kind,
        model=detail.model,
        created_us=detail.created_us,
        ended_us=detail.ended_us,
        code=detail.code,
        error=detail.error or "",
        session=detail.session,
        tasks=tuple(
            TaskBrief(stage=task.stage, state=task.state, worker=task.owner)
            for task in detail.tasks
            if task.stage != CLIENT
        ),
        first_us={
            edge.name: edge.first_us for edge in detail.edges if edge.medium and edge.first_us
        },
    )
