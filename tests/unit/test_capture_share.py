"""The share of computing time that captures (requests that record an answer's hidden states for
training) may take while answers are computed.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from fleet.core.captures import TAPS
from fleet.core.ids import RequestId
from fleet.core.request import Sampling
from fleet.engine.base import EngineRequest
from fleet.engine.torch.captures import QUIET_S, Captures
from fleet.engine.torch.kv_pool import PageTable
from fleet.engine.torch.pass_queue import PassEntry
from fleet.engine.torch.scheduled import ScheduledRequest

PASS_S = 0.02


class ThousandRows:
    """A task of a thousand rows."""

    num_rows = 1000


def scheduled(name: str, *captured: str) -> ScheduledRequest[Any]:
    request = EngineRequest(
        request_id=RequestId(name), sampling=Sampling(max_tokens=1), captured=captured
    )
    return ScheduledRequest(
        request=request, task=cast(Any, ThousandRows()), table=cast(PageTable, None)
    )


ANSWER = scheduled("a")
CAPTURES = [scheduled("c1", TAPS), scheduled("c2", TAPS)]


class Loop:
    """A batch loop whose steps take a fixed time."""

    def __init__(self, share: float) -> None:
        self.now_s = self.spent_s = 0.0
        self.captures = Captures(share, lambda: self.now_s)

    def run_pass(self, requests: Sequence[ScheduledRequest[Any]]) -> list[str]:
        chosen = list(self.captures.choose(requests))
        self.now_s += PASS_S
        planned = [(each, cast("PassEntry[Any]", None)) for each in chosen]
        self.spent_s += PASS_S * self.captures.record(planned, PASS_S)
        return [each.request.request_id for each in chosen]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_captures_take_their_share_of_the_elapsed_time_while_answers_are_computed(
    share: float,
) -> None:
    loop, num_passes = Loop(share), 2000
    loop.run_pass([ANSWER])
    for _ in range(num_passes):
        loop.run_pass([ANSWER, *CAPTURES])
    assert loop.spent_s == pytest.approx(share * num_passes * PASS_S, rel=0.1)


def test_gaps_between_answers_leave_captures_their_share() -> None:
    """Captures take no more than their share of time even in the gaps between answers, since the
    next answer would have to wait for a capture that begins in a gap.
    """
    loop, share = Loop(0.02), 0.02
    for _ in range(500):
        loop.run_pass([ANSWER])
        gap_ends_s = loop.now_s + 0.9 * QUIET_S
        while loop.now_s < gap_ends_s:
            loop.run_pass(CAPTURES)
    assert loop.spent_s <= 1.05 * share * loop.now_s


def test_captures_run_freely_and_together_once_no_answer_is_computed() -> None:
    loop = Loop(0.0)
    loop.run_pass([ANSWER, *CAPTURES])
    assert loop.captures.due_in_s(CAPTURES) == pytest.approx(QUIET_S - PASS_S)
    loop.now_s += QUIET_S
    assert loop.captures.due_in_s(CAPTURES) == 0
    for _ in range(3):
        assert loop.run_pass(CAPTURES) == ["c1", "c2"]


def test_one_capture_at_a_time_is_computed_beside_answers() -> None:
    loop = Loop(0.5)
    loop.run_pass([ANSWER])
    assert loop.run_pass([ANSWER, *CAPTURES]) == ["c1"]
    assert loop.run_pass([ANSWER, *CAPTURES]) == ["a"]


def test_one_capture_is_in_flight_beside_answers_where_several_passes_are() -> None:
    """Beside answers, one capture is in flight where several steps are: its time, which the share
    bounds, is known only once its step has ended.
    """
    loop, running = Loop(0.5), scheduled("c1", TAPS)
    loop.run_pass([ANSWER])
    running.running.append(cast("PassEntry[Any]", None))
    assert loop.run_pass([ANSWER, running, CAPTURES[1]]) == ["a"]
    running.running.clear()
    assert loop.run_pass([ANSWER, running, CAPTURES[1]]) == ["c1"]


def test_paused_answers_do_not_delay_captures() -> None:
    """Paused answers do not delay captures (requests that record hidden states). An answer is
    paused while its client lags behind, however long; only answers being computed hold captures
    back.
    """
    loop, paused = Loop(0.0), scheduled("a")
    paused.paused = True
    assert loop.run_pass([paused, *CAPTURES]) == ["c1", "c2"]


def test_nothing_is_due_without_captures() -> None:
    assert Captures(0.5).due_in_s([ANSWER]) == math.inf
