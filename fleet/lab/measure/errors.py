"""Error of the benchmarks."""

from fleet.core.errors import FleetError


class BenchError(FleetError):
    """A measurement failed; the message names the cause and the remedy."""

    code = "bench_failed"
