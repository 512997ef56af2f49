"""Samples to percentiles, and measured numbers to ratios against their targets. Pure."""

from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one quantity over many samples, in its own unit."""

    count: int
    p50: float
    p95: float
    mean: float
    low: float
    high: float


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One number held against its target. `at_most` says on which side of the target it must lie."""

    name: str
    value: float
    target: float
    at_most: bool
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default.

    Invariants: at least one sample; 0 <= percent <= 100.
    """
    assert samples and 0 <= percent <= 100, f"percentile {percent} of {len(samples)} samples"
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(samples: Sequence[float | None]) -> Summary | None:
    """None where nothing was measured; samples that are None do not count."""
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
