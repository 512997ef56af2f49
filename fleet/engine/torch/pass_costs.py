"""Times of passes, and the number of drafts that is worth its time. Knows no requests."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

WEIGHT, RARE_WEIGHT = 0.1, 0.5
"""Weight of a new measure in the averages, and of one that is taken now and then only."""
FEWEST_MEASURES = 3
FIRST_INTERVAL, LAST_INTERVAL = 32, 256
"""Passes after which an alternative is measured again; more each time that the choice is confirmed."""
BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of drafts of a pass whose times are kept apart; others count as the next lower one."""


@dataclass(slots=True)
class Average:
    value: float = 0.0
    num_measures: int = 0

    @property
    def is_known(self) -> bool:
        return self.num_measures >= FEWEST_MEASURES

    def add(self, value: float, weight: float) -> None:
        self.num_measures += 1
        self.value += (value - self.value) * max(weight, 1 / self.num_measures)


class PassTimes:
    """Times of passes by a number, such as that of their requests or drafts."""

    def __init__(self) -> None:
        self._times: dict[int, Average] = {}

    def add(self, number: int, seconds: float, weight: float = WEIGHT) -> None:
        self._times.setdefault(number, Average()).add(seconds, weight)

    def is_known(self, number: int) -> bool:
        return number in self._times and self._times[number].is_known

    def of(self, number: int) -> float | None:
        """Return the time of such a pass, between those of the nearest numbers that are known; None while none is."""
        known = sorted(each for each, time in self._times.items() if time.is_known)
        if not known:
            return None
        at = bisect_left(known, number)
        below, above = known[max(0, at - 1)], known[min(at, len(known) - 1)]
        first, last = self._times[below].value, self._times[above].value
        if number <= below or number >= above:
            return first if number <= below else last
        return first + (last - first) * (number - below) / (above - below)


def bucket_of(num_drafts: int) -> int:
    return BUCKETS[bisect_right(BUCKETS, num_drafts) - 1]


@dataclass(slots=True)
class PassCosts:
    """Times of decode passes of one number of requests, by the number of their drafts.

    `chosen`: of the last pass, the best number of drafts for each request; `num_same`: passes since an alternative was measured,
    `interval`: after which the next one is, `alternative`: which.
    """

    times: PassTimes = field(default_factory=PassTimes)
    chosen: int = 0
    is_alternative: bool = False
    num_same: int = 0
    interval: int = FIRST_INTERVAL
    alternative: int = 0

    @property
    def plain_s(self) -> float | None:
        """Time of a pass without drafts; None before it is known."""
        return self.times.of(0) if self.times.is_known(0) else None

    def add(self, num_drafts: int, seconds: float) -> None:
        self.times.add(bucket_of(num_drafts), seconds, RARE_WEIGHT if self.is_alternative else WEIGHT)

    def choice(self, tokens: Sequence[float], drafts: Sequence[int]) -> int:
        """Return the best number of drafts for each request.

        `tokens`: expected of a pass for each such number from 0 on; `drafts`: of all requests together.
        """
        self.is_alternative = False
        if not self.times.is_known(0):
            return 0
        if not self.times.is_known(bucket_of(drafts[-1])):
            return len(drafts) - 1
        times = [self.times.of(number) or 0.0 for number in drafts]
        return self._or_alternative(max(range(len(drafts)), key=lambda number: tokens[number] / times[number]), len(drafts))

    def _or_alternative(self, best: int, count: int) -> int:
        """Return now and then another number than the best, each in its turn, so that all times stay known."""
        if (best > 0) != (self.chosen > 0):
            self.num_same, self.interval = 0, FIRST_INTERVAL
        self.chosen = best
        self.num_same += 1
        if self.num_same < self.interval:
            return best
        self.num_same, self.interval, self.is_alternative = 0, min(2 * self.interval, LAST_INTERVAL), True
        self.alternative = (self.alternative + 1) % count
        if self.alternative == best:
            self.alternative = (self.alternative + 1) % count
        return self.alternative
