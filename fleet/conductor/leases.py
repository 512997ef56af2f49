"""Leases as the leader observes them, on its own monotonic clock. Pure: knows no Redis, and reads
no clock.

Deadlines are times of Redis's wall clock, which may be set forward or back. So a deadline alone
proves nothing: a lease lapses when the leader has seen it unrenewed for its whole duration. Units:
s of the observer's clock, us of Redis's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.config.schema import RENEWALS
from fleet.core.ids import WorkerId

STEP_S = 0.1
"""A smaller difference of two clocks may be their adjustment, and changes no decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLease:
    """`deadline_us` as the worker last wrote it; `lapses_s`: when the lease lapses unless it is
    renewed.
    """

    deadline_us: int
    duration_s: float
    lapses_s: float


class LeaseWatch:
    """The leases of the listed workers and gateways. A new observer gives each of them its whole
    duration once more.
    """

    def __init__(self) -> None:
        self._leases: dict[WorkerId, ObservedLease] = {}
        self._observed_s = -math.inf

    def observe(
        self, now_s: float, redis_us: int, leases_us: Mapping[WorkerId, tuple[int, int]]
    ) -> dict[WorkerId, int]:
        """Record the deadlines and durations that were read at Redis's time `redis_us`; return the
        deadlines of lapsed leases.

        `now_s`: time after the reply.
        """
        elapsed_s, self._observed_s = now_s - self._observed_s, now_s
        before, self._leases = self._leases, {}
        for worker, (deadline_us, duration_us) in leases_us.items():
            lease, duration_s = before.get(worker), duration_us / 1e6
            # An observer that has not looked for a whole lease may have been suspended together
            # with the workers.
            watched = elapsed_s <= duration_s
            if lease is None or lease.deadline_us != deadline_us or not watched:
                age_s = _age_s(duration_s, deadline_us, redis_us, elapsed_s) if watched else 0.0
                lease = ObservedLease(
                    deadline_us=deadline_us,
                    duration_s=duration_s,
                    lapses_s=now_s + duration_s - age_s,
                )
            self._leases[worker] = lease
        return {
            worker: lease.deadline_us
            for worker, lease in self._leases.items()
            if lease.lapses_s <= now_s
        }

    def due_s(self, now_s: float) -> float:
        """Return when to observe again: as often as leases are renewed, and when the next of them
        may lapse.
        """
        left_s = [
            min(lease.lapses_s - now_s, lease.duration_s / RENEWALS)
            for lease in self._leases.values()
        ]
        return now_s + min((left for left in left_s if left > 0), default=math.inf)


def _age_s(duration_s: float, deadline_us: int, redis_us: int, elapsed_s: float) -> float:
    """Return how long ago a new deadline was written, by Redis's clock, within limits that hold
    also if that clock was set.

    It was written since the last observation, and a live worker's latest one is no older than the
    interval of renewals. So if the clock was set in between, the lease still lasts for all renewals
    but one.
    """
    age_s = duration_s - (deadline_us - redis_us) / 1e6
    return min(max(age_s, 0.0), elapsed_s, duration_s / RENEWALS)


class ClockComparison:
    """Comparison of Redis's clock with the observer's, to notice that Redis's was set."""

    def __init__(self) -> None:
        self._ahead_s: tuple[float, float] | None = None

    def step_s(self, asked_s: float, answered_s: float, redis_us: int) -> float:
        """Return by how much Redis's clock was set forward since the last call; negative: back;
        0.0: by less than `STEP_S`.

        `redis_us` was read between `asked_s` and `answered_s`, so a slow reply is not mistaken for
        a step.
        """
        least, most = redis_us / 1e6 - answered_s, redis_us / 1e6 - asked_s
        before, self._ahead_s = self._ahead_s, (least, most)
        if before is None:
            return 0.0
        step_s = max(least - before[1], 0.0) + min(most - before[0], 0.0)
        return step_s if abs(step_s) >= STEP_S else 0.0
