"""When a kept command is started again, and when it is given up."""

import pytest

from fleet.cli.keep import CANNOT_START_S, DEATHS_WINDOW_S, FIRST_PAUSE_S, MAX_DEATHS, RestartPolicy

KILLED, FAILED = -9, 1


def test_failing_soon_after_the_first_start_is_not_being_able_to_start() -> None:
    assert RestartPolicy(first_started_s=0.0).pause_s(FAILED, CANNOT_START_S - 1) is None


def test_failing_later_is_a_crash_and_is_tried_again() -> None:
    assert RestartPolicy(first_started_s=0.0).pause_s(FAILED, CANNOT_START_S + 1) == FIRST_PAUSE_S


@pytest.mark.parametrize("now_s", [0.0, 1.0, CANNOT_START_S * 100])
def test_being_killed_is_never_its_own_fault(now_s: float) -> None:
    assert RestartPolicy(first_started_s=0.0).pause_s(KILLED, now_s) == FIRST_PAUSE_S


def test_failing_after_a_kill_is_tried_again() -> None:
    """Redis may be gone in the same moment: what started once can start again."""
    policy = RestartPolicy(first_started_s=0.0)
    assert policy.pause_s(KILLED, 5.0) is not None
    assert policy.pause_s(FAILED, 6.0) is not None


def test_pauses_grow_until_too_many_deaths_in_a_window_end_it() -> None:
    policy = RestartPolicy(first_started_s=0.0)
    pauses = [policy.pause_s(KILLED, float(second)) for second in range(MAX_DEATHS + 1)]
    assert pauses[:-1] == [FIRST_PAUSE_S * 2**number for number in range(MAX_DEATHS)]
    assert pauses[-1] is None


def test_deaths_far_apart_never_end_it() -> None:
    policy = RestartPolicy(first_started_s=0.0)
    for number in range(10 * MAX_DEATHS):
        assert policy.pause_s(KILLED, number * (DEATHS_WINDOW_S + 1)) == FIRST_PAUSE_S
