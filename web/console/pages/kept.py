"""The page of kept answers: what this host keeps for days, and why. Knows no stage by name."""

from collections import OrderedDict
from dataclasses import dataclass, replace

from fleet.core.errors import NotFound
from fleet.history.choice import REASONS
from fleet.history.store import KeptAnswer
from web.console.answer_facts import AnswerFacts
from web.console.page_context import (
    FilteredContext,
    FilterLink,
    LivePage,
    Query,
    build_path,
    read_filters,
)
from web.console.verdict import AnswerVerdict, judge
from web.fleet_api.history import MAX_US
from web.fleet_api.request_detail import read_record
from web.gateway.gateway import Gateway
from web.http.query_params import choice_param, int_param

PATH = "/kept"
FIELDS = ("why",)
PAGE_SIZE = 25
MAX_JUDGED = 200
"""Number of answers whose verdicts are remembered, since an open page is read every two seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """A kept answer, and the verdict on it; None if the answer's record cannot be read."""

    answer: KeptAnswer
    verdict: AnswerVerdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptContext(FilteredContext):
    """Data of the page. `keeps`: False if this server keeps no answers."""

    keeps: bool = True
    chips: tuple[FilterLink, ...] = ()
    rows: tuple[KeptRow, ...] = ()


class KeptPage(LivePage):
    key = active = "kept"
    title = "Kept answers"
    path = PATH
    live = ("trouble", "chips", "rows", "pager")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._judged: OrderedDict[tuple[str, int, tuple[str, ...]], AnswerVerdict | None] = (
            OrderedDict()
        )

    def empty(self, query: Query) -> KeptContext:
        wanted, before = read_filters(query, FIELDS), query.get("before", "")
        return KeptContext(
            wanted=wanted,
            stream_query={**wanted, "before": before},
            newest=build_path(PATH, wanted) if before else "",
            keeps=self._gateway.history.is_enabled,
        )

    async def read(self, query: Query) -> KeptContext:
        """Return the kept answers. Raises: BadInput if a parameter is invalid."""
        history, shown = self._gateway.history, self.empty(query)
        why = choice_param(shown.wanted, "why", REASONS)
        before_us = int_param(query, "before", 0, MAX_US)
        counts = await history.counts()
        found = await history.newest(PAGE_SIZE + 1, before_us=before_us, why=why)
        page = found[:PAGE_SIZE]
        more = {**shown.wanted, "before": str(page[-1].kept_us)} if len(found) > len(page) else {}
        chips = (
            FilterLink(
                name=name,
                count=counts.get(name, 0),
                path=build_path(PATH, {"why": name}),
                chosen=why == name,
            )
            for name in ("", *REASONS)
        )
        return replace(
            shown,
            chips=tuple(chips),
            rows=tuple([KeptRow(answer=one, verdict=await self._judge(one)) for one in page]),
            older=build_path(PATH, more) if more else "",
        )

    async def _judge(self, answer: KeptAnswer) -> AnswerVerdict | None:
        key = (answer.request, answer.kept_us, answer.why)
        if key not in self._judged:
            try:
                detail = (await read_record(self._gateway, answer.request)).detail
                facts = AnswerFacts(detail, self._gateway.graph, detail.audio_rate_hz)
                self._judged[key] = judge(facts)
            except NotFound:
                self._judged[key] = None
            while len(self._judged) > MAX_JUDGED:
                self._judged.popitem(last=False)
        return self._judged[key]
