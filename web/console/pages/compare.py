"""The page that compares two answers: their verdicts, their lanes on one axis, and a table of
differences. Knows no stage by name.
"""

import statistics
from dataclasses import dataclass, replace
from http import HTTPStatus

from fleet.core.errors import BadInput, NotFound
from fleet.core.ids import REQUEST, RequestId, request_id_of
from fleet.telemetry.trace import RequestFilter
from web.console.answer_view import AnswerLoader, AnswerView
from web.console.differences import DifferenceGroup, find_differences
from web.console.lanes import Axis, Waterfall
from web.console.page_context import LivePage, PageContext, Query
from web.console.pages.requests import build_row
from web.fleet_api.request_detail import RequestDetail
from web.gateway.gateway import Gateway

NEAR_US = 1_800_000_000
"""Time before and after an answer in which answers are compared with it by default: together an
hour.
"""
MAX_CONSIDERED = 200
SHOWN = ("you", "answer", "flow", "request", "stage")
"""Kinds of lanes that two answers have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAnswer:
    """An answer of the two. `waterfall` has the same axis as the waterfall of the other."""

    answer: AnswerView
    waterfall: Waterfall


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareContext(PageContext):
    """Data of the page. `other` is the id of the second answer, "" if none was found; `chosen` is
    True if the page itself chose that answer, the median of the hour around the first answer.
    """

    id: str
    other: str = ""
    chosen: bool = False
    answers: tuple[ComparedAnswer, ...] = ()
    groups: tuple[DifferenceGroup, ...] = ()


class ComparePage(LivePage):
    key = "compare"
    active = "requests"
    path = "/requests/{id}/compare"
    live = ("trouble", "lanes", "differences")

    def __init__(self, gateway: Gateway, answers: AnswerLoader) -> None:
        super().__init__(gateway)
        self._answers = answers

    def empty(self, query: Query) -> CompareContext:
        request, other = request_id_of(query["id"]), request_id_of(query.get("with", "").strip())
        return CompareContext(id=request, other=other, stream_query={"id": request, "with": other})

    async def read(self, query: Query) -> CompareContext:
        """Return both answers. Without the parameter `with`, the second is the median answer of the
        hour around the first. An answer that is not stored is named, with the status 404.

        Raises: BadInput if both ids are the same; RedisUnreachable.
        """
        found = self.empty(query)
        if found.other == found.id:
            raise BadInput("with: both ids name the same answer; name another one", param="with")
        try:
            first = await self._answers.read(RequestId(found.id))
            if not found.other:
                other = await self._find_median(first.detail)
                found = replace(
                    found,
                    other=other,
                    chosen=bool(other),
                    stream_query={"id": found.id, "with": other},
                )
            if not found.other:
                return replace(found, answers=_on_one_axis(first))
            second = await self._answers.read(RequestId(found.other))
        except NotFound as error:
            return replace(found, trouble=error.message, status=HTTPStatus.NOT_FOUND)
        return replace(
            found,
            answers=_on_one_axis(first, second),
            groups=find_differences(first.facts, second.facts),
        )

    async def _find_median(self, detail: RequestDetail) -> str:
        """Return the id of the answer with the median wait for the first output, among finished
        answers of the same kind submitted within half an hour before or after `detail`; "" if there
        is none.
        """
        latest_ms = (detail.created_us + NEAR_US) // 1000
        page = await self._gateway.client.telemetry.list_requests(
            RequestFilter(state="finished", kind=detail.kind),
            before=f"{REQUEST}{latest_ms:012x}",
            limit=MAX_CONSIDERED,
        )
        firsts = [
            (first_ms, row.id)
            for row in page.rows
            if row.id != detail.id and row.created_us >= detail.created_us - NEAR_US
            if (first_ms := build_row(row, self._gateway).first_ms) is not None
        ]
        return statistics.median_low(firsts)[1] if firsts else ""


def _on_one_axis(*answers: AnswerView) -> tuple[ComparedAnswer, ...]:
    """Return the answers with lanes that begin at the same moment, counted from the submission."""
    axes = [answer.axis for answer in answers]
    lead_us = max(axis.zero_us - axis.start_us for axis in axes)
    length_us = max(axis.end_us - axis.zero_us for axis in axes)
    return tuple(
        ComparedAnswer(
            answer=answer,
            waterfall=_only_common(
                answer.waterfall(
                    Axis(axis.zero_us - lead_us, axis.zero_us + length_us, axis.zero_us)
                )
            ),
        )
        for answer, axis in zip(answers, axes, strict=True)
    )


def _only_common(shown: Waterfall) -> Waterfall:
    lanes = tuple(lane for lane in shown.lanes if lane.kind in SHOWN)
    return Waterfall(lanes=lanes, labels=shown.labels)
