"""When a kept command is started again, and when it is given up."""

import pytest

from fleet.cli.keep import CANNOT_START_S, FIRST_PAUSE_S, MAX_PAUSE_S, WELL_S, RestartPolicy

KILLED, FAILED = -9, 1


def policy() -> RestartPolicy:
    return RestartPolicy(first_started_s=0.0)


def test_failing_soon_after_the_first_start_is_not_being_able_to_start() -> None:
    assert policy().pause_s(FAILED, 0.0, CANNOT_START_S - 1) is None


def test_failing_later_is_a_crash_and_is_tried_again() -> None:
    assert policy().pause_s(FAILED, 0.0, CANNOT_START_S + 1) == FIRST_PAUSE_S


@pytest.mark.parametrize("now_s", [0.0, 1.0, CANNOT_START_S * 100])
def test_being_killed_is_never_its_own_fault(now_s: float) -> None:
    assert policy().pause_s(KILLED, 0.0, now_s) == FIRST_PAUSE_S


def test_failing_after_a_kill_is_tried_again() -> None:
    """Redis may be gone in the same moment: what started once can start again."""
    kept = policy()
    assert kept.pause_s(KILLED, 0.0, 5.0) is not None
    assert kept.pause_s(FAILED, 5.1, 6.0) is not None


def test_pauses_double_up_to_a_bound_and_never_end() -> None:
    kept, now_s, pauses = policy(), 0.0, list[float]()
    for _ in range(2000):
        pause_s = kept.pause_s(KILLED, now_s, now_s + 0.5)
        assert pause_s is not None
        pauses.append(pause_s)
        now_s += 0.5 + pause_s
    assert pauses[:5] == [FIRST_PAUSE_S * 2**number for number in range(5)]
    assert pauses[-1] == MAX_PAUSE_S and pauses == sorted(pauses)


def test_having_run_well_for_a_while_makes_pauses_short_again() -> None:
    kept = policy()
    pauses = [kept.pause_s(KILLED, second, second + 0.5) for second in range(1, 5)]
    assert pauses[-1] == FIRST_PAUSE_S * 8
    assert kept.pause_s(KILLED, 10.0, 10.0 + WELL_S - 1) == FIRST_PAUSE_S * 16
    assert kept.pause_s(KILLED, 100.0, 100.0 + WELL_S) == FIRST_PAUSE_S
    assert kept.pause_s(KILLED, 200.0, 200.5) == FIRST_PAUSE_S * 2
