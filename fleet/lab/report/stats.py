"""Statistics of samples, and measured numbers with targets. Pure."""

from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the samples of one quantity, in the quantity's unit."""

    count: int
    p50: float
    p95: float
    mean: float
    low: float
    high: float


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A measured number and its target; the functions `at_least` and `at_most` make one.

    `at_most`: True for an upper limit, False for a lower limit.
    """

    name: str
    value: float
    target: float
    at_most: bool
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def at_most(name: str, value: float, target: float, unit: str = "x") -> Ratio:
    """Return a number with an upper limit as its target."""
    return Ratio(name=name, value=value, target=target, at_most=True, unit=unit)


def at_least(name: str, value: float, target: float, unit: str = "x") -> Ratio:
    """Return a number with a lower limit as its target."""
    return Ratio(name=name, value=value, target=target, at_most=False, unit=unit)


def differing(num_equal: int, num_answers: int) -> Ratio:
    """Return the number of answers that differ from the expected ones, with the target 0.
    `num_equal`: number of equal answers.
    """
    return at_most("differing answers", num_answers - num_equal, 0, "answers")


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile of the samples, interpolated linearly between the two nearest ranks as
    numpy does by default.

    Invariants: at least one sample; 0 <= percent <= 100.
    """
    assert samples and 0 <= percent <= 100, f"percentile {percent} of {len(samples)} samples"
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(samples: Sequence[float]) -> float:
    """Return the 50th percentile of the samples."""
    return percentile(samples, 50)


def summarise(samples: Sequence[float | None]) -> Summary | None:
    """Summarise the samples, without None values; return None if no sample remains."""
    known = [sample for sample in samples if sample is not None]
    if not known:
        return None
    return Summary(
        count=len(known),
        p50=median(known),
        p95=percentile(known, 95),
        mean=sum(known) / len(known),
        low=min(known),
        high=max(known),
    )
