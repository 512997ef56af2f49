"""Targets of a measurement that are met on every machine, as its small run checks them. Measures nothing."""

from fleet.bench.result import Result


def assert_met_everywhere(result: Result) -> None:
    """Check the targets that count or compare, and that the measurement has such a target."""
    targets = [ratio for ratio in result.targets() if ratio.everywhere]
    assert targets, f"{type(result).__name__} has no target that is met everywhere"
    missed = [f"{ratio.name}: {ratio.value:g}, target {ratio.target:g}" for ratio in targets if not ratio.met]
    assert not missed, missed
