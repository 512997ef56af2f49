"""The benchmark's own error: something outside did not do its part."""

from fleet.core.errors import FleetError


class BenchError(FleetError):
    """What was to be measured could not be; the message says what and how to mend it."""

    code = "bench_failed"
