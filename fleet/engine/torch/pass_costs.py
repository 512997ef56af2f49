"""Times of passes, and the number of drafts that is worth its time. Knows no requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

WEIGHT, RARE_WEIGHT = 0.1, 0.5
"""Weight of a new measure in the averages, and of one that is taken now and then only."""
FEWEST_MEASURES = 3
FIRST_INTERVAL, LAST_INTERVAL = 32, 256
"""Passes after which the alternative is measured again; more each time that it confirms the choice."""


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


@dataclass(slots=True)
class PassCosts:
    """Times of decode passes of one number of requests: without drafts, and what one draft adds.

    `num_same`: passes since the alternative was measured; `interval`: after which it is measured again.
    """

    plain_s: Average = field(default_factory=Average)
    draft_s: Average = field(default_factory=Average)
    drafted: bool = False
    num_same: int = 0
    interval: int = FIRST_INTERVAL

    def add(self, num_drafts: int, seconds: float) -> None:
        weight = WEIGHT if (num_drafts > 0) == self.drafted else RARE_WEIGHT
        if not num_drafts:
            self.plain_s.add(seconds, weight)
        elif self.plain_s.is_known:
            self.draft_s.add((seconds - self.plain_s.value) / num_drafts, weight)

    def choice(self, tokens: Sequence[float], drafts: Sequence[int]) -> int:
        """Return the best number of drafts for each request.

        `tokens`: expected of a pass for each such number from 0 on; `drafts`: of all requests together.
        """
        if not self.plain_s.is_known:
            return 0
        if not self.draft_s.is_known:
            return len(drafts) - 1
        times = [self.plain_s.value + max(0.0, self.draft_s.value) * number for number in drafts]
        best = max(range(len(drafts)), key=lambda number: tokens[number] / times[number])
        return self._or_alternative(best, len(drafts) - 1)

    def _or_alternative(self, best: int, most: int) -> int:
        """Return now and then the alternative to the choice, so that its time stays known."""
        if (best > 0) != self.drafted:
            self.drafted, self.num_same, self.interval = best > 0, 0, FIRST_INTERVAL
        self.num_same += 1
        if self.num_same < self.interval:
            return best
        self.num_same, self.interval = 0, min(2 * self.interval, LAST_INTERVAL)
        return 0 if best else most
