"""Leases as the leading conductor observes them, on its own monotonic clock. Pure: knows no Redis,
and reads no clock.

Deadlines are times of Redis's wall clock, which may be set forward or back. So a deadline alone
proves nothing: a lease lapses when the leader has seen it unrenewed for its whole duration. Units:
`*_s` are seconds of the leader's clock, `*_us` microseconds of Redis's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.config.schema import RENEWALS
from fleet.core.ids import WorkerId

STEP_S = 0.1
"""Smallest change of the difference between two clocks, in seconds, by which Redis's clock counts
as set. A smaller change may be a gradual adjustment.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLease:
    """A lease as last observed. `deadline_us`: deadline that the worker last wrote. `lapses_s`:
    time at which the lease lapses unless the worker renews it.
    """

    deadline_us: int
    duration_s: float
    lapses_s: float


class LeaseWatch:
    """Observer of the leases of all listed workers and gateways. A new observer waits the whole
    duration of each lease before that lease can lapse.
    """

    def __init__(self) -> None:
        self._leases: dict[WorkerId, ObservedLease] = {}
        self._observed_s = -math.inf

    def observe(
        self, now_s: float, redis_us: int, leases_us: Mapping[WorkerId, tuple[int, int]]
    ) -> dict[WorkerId, int]:
        """Record the leases that were read from Redis; return the deadlines of lapsed leases, by
        worker.

        `now_s`: the observer's time after the reply. `redis_us`: Redis's time of the reading.
        `leases_us`: deadline and duration of each lease.
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
        """Return the time of the next observation: when leases are due for renewal, or when the
        next lease may lapse, whichever is earlier; infinity if there is no lease to wait for.
        """
        left_s = [
            min(lease.lapses_s - now_s, lease.duration_s / RENEWALS)
            for lease in self._leases.values()
        ]
        return now_s + min((left for left in left_s if left > 0), default=math.inf)


def _age_s(duration_s: float, deadline_us: int, redis_us: int, elapsed_s: float) -> float:
    """Return the seconds since a new deadline was written, by Redis's clock.

    The result is limited to `elapsed_s`, the time since the last observation, and to the interval
    of renewals. So even if Redis's clock was set meanwhile, the worker keeps its lease long enough
    to renew it `RENEWALS` - 1 times.
    """
    age_s = duration_s - (deadline_us - redis_us) / 1e6
    return min(max(age_s, 0.0), elapsed_s, duration_s / RENEWALS)


class ClockComparison:
    """Comparison of Redis's clock with the observer's, to notice a setting of Redis's clock."""

    def __init__(self) -> None:
        self._ahead_s: tuple[float, float] | None = None

    def step_s(self, asked_s: float, answered_s: float, redis_us: int) -> float:
        """Return the seconds by which Redis's clock was set forward since the last call; negative
        if it was set back; 0.0 for less than `STEP_S` and in the first call.

        `redis_us`: Redis's time, read between `asked_s` and `answered_s` of the observer's clock,
        so a slow reply is not mistaken for a setting.
        """
        least, most = redis_us / 1e6 - answered_s, redis_us / 1e6 - asked_s
        before, self._ahead_s = self._ahead_s, (least, most)
        if before is None:
            return 0.0
        step_s = max(least - before[1], 0.0) + min(most - before[0], 0.0)
        return step_s if abs(step_s) >= STEP_S else 0.0
