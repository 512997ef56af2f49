"""Pacing of Redis round trips: with many answers a process begins them at least a pace apart, with
few answers immediately.
"""

import pytest

from fleet.control.pacing import PACE_S, PACED_ANSWERS, Pacing


def test_round_trips_with_few_answers_do_not_wait() -> None:
    pacing = Pacing(clock=lambda: 7.0)
    assert [pacing.wait_s(PACED_ANSWERS - 1) for _ in range(3)] == [0.0] * 3


def test_round_trips_with_many_answers_begin_a_pace_apart() -> None:
    now_s = 7.0
    pacing = Pacing(clock=lambda: now_s)
    begun: list[float] = []
    for work_s in (0.0, 0.001, 0.0, 3 * PACE_S, 0.0):
        now_s += pacing.wait_s(PACED_ANSWERS)
        begun.append(now_s)
        now_s += work_s
    gaps = [later - earlier for earlier, later in zip(begun, begun[1:], strict=False)]
    assert gaps == pytest.approx([PACE_S, PACE_S, PACE_S, 3 * PACE_S])
