"""Percentiles of samples, and numbers compared with targets. Pure."""

from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the samples of one quantity, in its unit."""

    count: int
    p50: float
    p95: float
    mean: float
    low: float
    high: float


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A number and its target. `at_most`: the number must not exceed the target; else it must reach
    it.
    """

    name: str
    value: float
    target: float
    at_most: bool
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def percentile(samples: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest ranks, as numpy does by default.

    Invariants: at least one sample; 0 <= percent <= 100.
    """
    assert samples and 0 <= percent <= 100, f"percentile {percent} of {len(samples)} samples"
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(samples: Sequence[float | None]) -> Summary | None:
    """Summarise the samples that are not None; None without any."""
    known = [sample for sample in samples if sample is not None]
    if not known:
        return None
    return Summary(
        count=len(known),
        p50=percentile(known, 50),
        p95=percentile(known, 95),
        mean=sum(known) / len(known),
        low=min(known),
        high=max(known),
    )
