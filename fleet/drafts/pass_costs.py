"""Step times, and the number of drafts that is worth its time. Knows no requests."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT, RARE_WEIGHT = 0.1, 0.5
"""Weight of a new measure in the averages, and of one that is taken now and then only."""
FEWEST_MEASURES = 3
MARGIN = 0.03
"""Part by which a pass with drafts must be faster per token than one without: less is within the
noise of the measures.
"""
FEWEST_BETWEEN, WASTED, MOST_CREDIT = 32, 0.01, 4
"""Passes between two measures of other numbers than the best; the share of the time that they may
waste, and for how many passes time may be saved for them.
"""
BUCKETS = (*range(8), *range(8, 32, 2), *range(32, 64, 4), *range(64, 128, 16), 128, 192, 256, 512)
"""Numbers of rows of a pass whose times are kept apart; others count as the next lower one."""


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
    """Step times by a number, such as the step's requests or rows."""

    def __init__(self) -> None:
        self._times: dict[int, Average] = {}

    def add(self, number: int, seconds: float, weight: float = WEIGHT) -> None:
        self._times.setdefault(number, Average()).add(seconds, weight)

    @property
    def least(self) -> int | None:
        """The smallest number whose time is known; None while none is."""
        return min((number for number, time in self._times.items() if time.is_known), default=None)

    def of(self, number: int) -> float | None:
        """Return the time of such a step, interpolated between the nearest known numbers; None
        while none is known.
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
    """Times of decode passes by their rows, without drafts and with them, and the number of drafts
    that is best by these.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = PassTimes(), PassTimes()
        self._num_same = 0
        """Steps since an alternative was measured."""
        self._credit_s = 0.0
        """Time that the next alternative may waste."""
        self._alternative = 0
        """Number of drafts of the next alternative."""
        self._is_alternative = False
        self._estimated_s = 0.0
        """Time of the alternative that is measured."""

    def plain_s(self, num_requests: int) -> float | None:
        """Return the time of a pass without drafts; None before any is known."""
        return self._plain.of(bucket_of(num_requests))

    def _time(self, num_requests: int, num_drafts: int) -> float:
        """Return the time of a pass. Below the fewest rows with drafts that are known, it is
        between that and a plain one's.
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
        """Count the time of a step. `apart_s`: time by which it took longer than such steps in a
        row, since a head read its backlog first; it counts as wasted on an alternative, not as time
        of the step.
        """
        weight = RARE_WEIGHT if self._is_alternative else WEIGHT
        if self._is_alternative:
            self._credit_s -= max(0.0, seconds + apart_s - self._estimated_s)
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
        """Return the best number of drafts for each request.

        `tokens`: expected tokens of a step for each such number from 0 on. `drafts`: drafts of all
        requests together, likewise. `token_s`: time that each token takes apart from steps if
        drafts are made. `is_timed`: the time of this step will be counted.
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
        """Count a pass without drafts for which no number was chosen."""
        self._num_same += 1
        self._credit_s += WASTED * (self.plain_s(num_requests) or 0.0)

    def _or_alternative(self, best: int, tokens: Sequence[float], times: Sequence[float]) -> int:
        """Return now and then another number than the best, each in its turn, so that all times
        stay known.

        They waste at most `WASTED` of the time, as far as it is known.
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
