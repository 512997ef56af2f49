"""Leases as the leader observes them: they lapse by the leader's own clock, even if Redis's clock
was set.
"""

import pytest

from fleet.conductor.leases import ClockComparison, LeaseWatch
from fleet.core.ids import WorkerId

WORKER, LEASE_US, REDIS_US = WorkerId("lm@test:1:a"), 1_250_000, 1_790_000_000_000_000


def observe(
    watch: LeaseWatch, now_s: float, deadline_us: int, *, ahead_s: float = 0.0
) -> list[WorkerId]:
    """Observe one lease while Redis's clock is `ahead_s` ahead of the observer's; return the lapsed
    leases.
    """
    return list(
        watch.observe(
            now_s, REDIS_US + int((now_s + ahead_s) * 1e6), {WORKER: (deadline_us, LEASE_US)}
        )
    )


def deadline(written_s: float, *, ahead_s: float = 0.0) -> int:
    return REDIS_US + int((written_s + ahead_s) * 1e6) + LEASE_US


def polled(
    watch: LeaseWatch, until_s: float, deadline_us: int, *, start_s: float, ahead_s: float = 0.0
) -> float:
    """Observe an unrenewed lease every 50 ms; return the time at which it lapses."""
    now_s = start_s
    while now_s < until_s:
        if observe(watch, now_s, deadline_us, ahead_s=ahead_s):
            return now_s
        now_s = round(now_s + 0.05, 3)
    raise AssertionError(f"not lapsed at {until_s} s")


def test_unrenewed_lease_lapses_at_its_deadline() -> None:
    """An unrenewed lease lapses at its deadline. The age of its last renewal counts, which was
    written 0.15 s before it was observed.
    """
    watch = LeaseWatch()
    observe(watch, 0.0, deadline(-0.1))
    observe(watch, 0.2, deadline(0.05))
    assert polled(watch, 5.0, deadline(0.05), start_s=0.25) == 1.3


@pytest.mark.parametrize("ahead_s", [-3600.0, -1.2, 0.0, 1.2, 3600.0])
def test_new_observer_waits_for_the_duration_of_the_lease(ahead_s: float) -> None:
    """A new observer waits for a whole lease duration, although the worker is dead: Redis's clock
    was set before the observer began.
    """
    assert polled(LeaseWatch(), 5.0, deadline(-0.1), start_s=0.0, ahead_s=ahead_s) == 1.25


def test_observer_that_was_suspended_waits_for_the_duration_of_the_lease() -> None:
    watch = LeaseWatch()
    observe(watch, 0.0, deadline(0.0))
    assert polled(watch, 15.0, deadline(0.0), start_s=10.0) == 11.25


@pytest.mark.parametrize("ahead_s", [-3600.0, -1.2, 1.2, 3600.0])
def test_renewal_that_is_seen_after_a_step_lasts_for_all_renewals_but_one(ahead_s: float) -> None:
    """A renewal first observed after Redis's clock was set lasts at least for the lease duration
    less one renewal interval (0.25 s). The renewal was written immediately before the clock was
    set.
    """
    watch = LeaseWatch()
    observe(watch, 0.0, deadline(-0.1))
    observe(watch, 0.2, deadline(0.15), ahead_s=ahead_s)
    assert polled(watch, 5.0, deadline(0.15), start_s=0.25, ahead_s=ahead_s) >= 0.2 + 1.25 - 0.25


def test_renewed_lease_never_lapses() -> None:
    watch = LeaseWatch()
    assert not [
        now
        for now in range(100)
        if observe(watch, now / 5, deadline(now / 5, ahead_s=-now), ahead_s=-now)
    ]


def test_next_observation_is_due_when_a_lease_may_lapse() -> None:
    watch = LeaseWatch()
    assert watch.due_s(1.0) == float("inf")
    observe(watch, 1.0, deadline(1.0))
    assert (watch.due_s(1.0), watch.due_s(2.2)) == (1.25, 2.25)


def test_slow_reply_is_no_step_of_the_clock() -> None:
    clock = ClockComparison()
    asked = [
        (0.0, 0.001, 0.0),
        (0.2, 5.2, 0.2),
        (5.4, 5.401, 5.4),
        (5.6, 5.601, 3605.6),
        (5.8, 5.801, 2.8),
    ]
    found = [
        clock.step_s(asked_s, answered_s, REDIS_US + int(redis_s * 1e6))
        for asked_s, answered_s, redis_s in asked
    ]
    assert [round(step_s) for step_s in found] == [0, 0, 0, 3600, -3603]
