"""Measured step times, and the number of drafts that pays off by them. Knows no requests."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT, RARE_WEIGHT = 0.1, 0.5
"""Weight of a new measurement in an average; the second is for step sizes that are measured only
now and then.
"""
FEWEST_MEASURES = 3
MARGIN = 0.03
"""Share by which a step with drafts must be faster per token than a step without; a smaller gain is
within measurement noise.
"""
FEWEST_BETWEEN, WASTED, MOST_CREDIT = 32, 0.01, 4
"""Limits on steps with another number of drafts than the best, which are made to measure their
time: fewest steps between two such steps; share of all time that they may waste; and the largest
saved allowance, as a multiple of the time of one step.
"""
BUCKETS = (*range(8), *range(8, 32, 2), *range(32, 64, 4), *range(64, 128, 16), 128, 192, 256, 512)
"""Row counts of a step for which times are kept separately; other counts use the next lower one."""


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
    """Average step times by a number, such as the step's requests or rows. The time of a number is
    known after `FEWEST_MEASURES` measurements.
    """

    def __init__(self) -> None:
        self._times: dict[int, Average] = {}

    def add(self, number: int, seconds: float, weight: float = WEIGHT) -> None:
        self._times.setdefault(number, Average()).add(seconds, weight)

    @property
    def least(self) -> int | None:
        """The smallest number whose time is known; None if no time is known."""
        return min((number for number, time in self._times.items() if time.is_known), default=None)

    def of(self, number: int) -> float | None:
        """Return the step time for `number`, interpolated between the nearest known numbers; None
        if no time is known.
        """
        known = sorted(each for each, time in self._times.items() if time.is_known)
        if not known:
            return None
        at = bisect_left(known, number)
        below, above = known[max(0, at - 1)], known[min(at, len(known) - 1)]
        first, last = self._times[below].value, self._times[above].value
        if number <= below or number >= above:
            return first if number <= below else last
        return first + (last - first) * (number - below) / (above - below)


def bucket_of(num_rows: int) -> int:
    return BUCKETS[bisect_right(BUCKETS, num_rows) - 1]


class PassCosts:
    """Average times of decode steps by row count, with and without drafts, from which the best
    number of drafts follows.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = PassTimes(), PassTimes()
        self._num_same = 0
        """Steps since another number of drafts than the best was measured."""
        self._credit_s = 0.0
        """Time that the next measurement of another number may waste."""
        self._alternative = 0
        """Number of drafts to measure next."""
        self._is_alternative = False
        self._estimated_s = 0.0
        """Expected time of the step that is being measured."""

    def plain_s(self, num_requests: int) -> float | None:
        """Return the time of a step without drafts; None while too few such steps are measured."""
        return self._plain.of(bucket_of(num_requests))

    def _time(self, num_requests: int, num_drafts: int) -> float:
        """Estimate the time of a step. Below the smallest measured step with drafts, the estimate
        lies between that step's time and the time without drafts.
        """
        size, plain_s = bucket_of(num_requests + num_drafts), self.plain_s(num_requests) or 0.0
        least = self._drafted.least
        if not num_drafts or least is None:
            return plain_s
        known_s = self._drafted.of(size) or 0.0
        own = bucket_of(num_requests)
        if size >= least or own >= least:
            return known_s
        return plain_s + (known_s - plain_s) * (size - own) / (least - own)

    def add(self, num_requests: int, num_drafts: int, seconds: float, apart_s: float = 0.0) -> None:
        """Count the time of a step.

        `apart_s`: additional time in which a draft head read its backlog before this step. If the
        step measured another number of drafts than the best, `apart_s` counts as wasted; it never
        counts as time of the step.
        """
        weight = RARE_WEIGHT if self._is_alternative else WEIGHT
        if self._is_alternative:
            self._credit_s -= max(0.0, seconds + apart_s - self._estimated_s)
            self._is_alternative = False
        (self._drafted if num_drafts else self._plain).add(
            bucket_of(num_requests + num_drafts), seconds, weight
        )

    def choice(
        self,
        num_requests: int,
        tokens: Sequence[float],
        drafts: Sequence[int],
        token_s: float = 0.0,
        *,
        is_timed: bool = True,
    ) -> int:
        """Return the number of drafts per request with the highest speed in tokens per second, or
        now and then another number, to measure it. Return 0 while no time without drafts is known,
        then the largest number while no time with drafts is known.

        `tokens`: expected tokens of a step, by number of drafts per request from 0 on. `drafts`:
        drafts of all requests together, by the same number. `token_s`: additional time per token if
        drafts are made. `is_timed`: True if the time of this step will be counted.
        """
        self._is_alternative = False
        if self._plain.least is None:
            return 0
        if self._drafted.least is None:
            return len(drafts) - 1
        times = [
            self._time(num_requests, number) + (token_s * expected if number else 0.0)
            for number, expected in zip(drafts, tokens, strict=True)
        ]
        speeds = [
            tokens[number] / times[number] / (1 + MARGIN * (number > 0))
            for number in range(len(drafts))
        ]
        best = max(range(len(drafts)), key=speeds.__getitem__)
        return self._or_alternative(best, tokens, times) if is_timed else best

    def count_plain(self, num_requests: int) -> None:
        """Count a step without drafts for which `choice` was not called."""
        self._num_same += 1
        self._credit_s += WASTED * (self.plain_s(num_requests) or 0.0)

    def _or_alternative(self, best: int, tokens: Sequence[float], times: Sequence[float]) -> int:
        """Return the best number of drafts, or now and then another number in turn, so that all
        times stay known. Such steps waste at most the share `WASTED` of the known time.
        """
        self._num_same += 1
        self._credit_s += WASTED * times[best]
        number = self._alternative % len(times)
        if number == best:
            self._alternative += 1
            number = self._alternative % len(times)
        wasted_s = times[number] - tokens[number] / tokens[best] * times[best]
        if number == best or self._num_same < FEWEST_BETWEEN or self._credit_s < wasted_s:
            return best
        self._num_same = 0
        self._alternative += 1
        self._is_alternative = True
        self._credit_s = min(self._credit_s, MOST_CREDIT * times[best]) - max(0.0, wasted_s)
        self._estimated_s = times[number]
        return number
