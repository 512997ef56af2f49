"""Histogram of the ages of chunks when they reach their consumer. Its buckets are fixed, so
histograms of many workers add up.

Pure. Knows no clock: on one machine ages are exact; between machines they include the difference of
the clocks.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

PER_DECADE = 20
BOUNDS_US = tuple(round(100 * 10 ** (step / PER_DECADE)) for step in range(5 * PER_DECADE + 1))
"""Upper bounds, from 0.1 ms to 10 s, each 12 % above the last; older chunks count as 10 s."""
SEPARATOR = ","


@dataclass(slots=True)
class HopCounts:
    """Ages of chunks, from the producer's time stamp to arrival at the consumer, one count per
    bound. Units: microseconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS_US))

    def add(self, age_us: int) -> None:
        self.counts[min(bisect_left(BOUNDS_US, age_us), len(BOUNDS_US) - 1)] += 1

    @property
    def total(self) -> int:
        return sum(self.counts)

    def __add__(self, other: "HopCounts") -> "HopCounts":
        return HopCounts(
            [left + right for left, right in zip(self.counts, other.counts, strict=True)]
        )

    def __sub__(self, earlier: "HopCounts") -> "HopCounts":
        """Return the counts added since `earlier`."""
        return HopCounts([new - old for new, old in zip(self.counts, earlier.counts, strict=True)])

    def percentile_us(self, percent: float) -> int | None:
        """Return the bound that `percent` of the ages do not exceed: up to 12 % too large. None
        without any ages.
        """
        wanted, seen = self.total * percent / 100, 0
        if not self.total:
            return None
        for bound, count in zip(BOUNDS_US, self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return bound
        raise AssertionError("counts that do not add up to their total")

    def encoded(self) -> str:
        return SEPARATOR.join(str(count) for count in self.counts)


def decode_hops(text: str) -> HopCounts:
    """Decode counts; empty if none were written yet, or another version with other bounds wrote
    them.
    """
    parts = text.split(SEPARATOR)
    return HopCounts([int(part) for part in parts]) if len(parts) == len(BOUNDS_US) else HopCounts()
