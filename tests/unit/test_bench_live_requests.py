"""The benchmark of the conductor beside live requests, at its small size: its report has every
window, and its targets follow the measured numbers.
"""

from pathlib import Path

import pytest

from fleet.lab.measure.live_requests import (
    FEW_LIVE,
    FEW_WORKERS,
    SMALL_LIVE,
    SMALL_WORKERS,
    ConductorWindow,
    LiveRequestsResult,
    SubmissionCost,
)
from tests.bench_reports import missed, run_bench


@pytest.mark.one_in(11, "benchmarks")
def test_live_requests_are_measured_beside_a_real_conductor(tmp_path: Path) -> None:
    result = run_bench(tmp_path, LiveRequestsResult, "live_requests", "--live-requests", "--small")
    assert [window.live for window in result.windows] == [FEW_LIVE] * 2 + [SMALL_LIVE] * 2
    assert [window.is_idle for window in result.windows] == [True, False, True, False]
    assert sum(window.conductor_s for window in result.windows) > 0
    few, many = result.submissions
    assert (few.workers, many.workers) == (FEW_WORKERS, SMALL_WORKERS)
    assert few.commands == many.commands > 0, "a submission costs the same beside many workers"
    assert few.redis_us > 0


def result(
    *, idle_s: float = 0.1, loaded_s: float = 0.1, submit_us: float = 110.0, commands: float = 60.0
) -> LiveRequestsResult:
    return LiveRequestsResult(
        windows=tuple(
            ConductorWindow(
                live=live, seconds=10.0, chunks=chunks, conductor_s=conductor_s, redis_s=1.0
            )
            for live, chunks, conductor_s in (
                (20, 0, 0.1),
                (20, 2000, 0.1),
                (10_000, 0, idle_s),
                (10_000, 2000, loaded_s),
            )
        ),
        submissions=(
            SubmissionCost(workers=10, redis_us=100.0, commands=60.0),
            SubmissionCost(workers=1000, redis_us=submit_us, commands=commands),
        ),
    )


@pytest.mark.parametrize(
    ("measured", "names"),
    [
        (result(), []),
        (result(idle_s=0.2), ["conductor without traffic, 10000 live requests / 20"]),
        (
            result(loaded_s=0.6),
            [
                "conductor with traffic, 10000 live requests / 20",
                "conductor with traffic at 10000 live requests",
            ],
        ),
        (result(submit_us=121), ["time of a submission, 1000 workers / 10"]),
        (result(commands=61), ["commands of a submission, 1000 workers / 10"]),
    ],
)
def test_targets_follow_the_measured_numbers(
    measured: LiveRequestsResult, names: list[str]
) -> None:
    assert missed(measured) == names
