"""The benchmark of hidden-state transfer between span workers: as a command at the small size, and
its target.
"""

from pathlib import Path

import pytest

from fleet.lab.studies.span_hops import (
    HOST,
    SMALL_SIZES_KIB,
    TARGET,
    TCP,
    THRESHOLD_KIB,
    HopSamples,
    SpanHopsResult,
    TransportHops,
)
from fleet.spans.net.ring import MIN_BLOCK_BYTES
from tests.bench_reports import run_bench


@pytest.mark.one_in(11, "benchmarks")
def test_small_measurement_of_hops_reports_both_transports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(tmp_path, SpanHopsResult, "span_hops", "--span-hops", "--small")
    assert "UCX_TLS=tcp" in capsys.readouterr().out
    assert [each.transport for each in result.transports] == [HOST, TCP]
    for each in result.transports:
        assert [hop.kib for hop in each.hops] == list(SMALL_SIZES_KIB)
        assert all(
            hop.ratio > 0 and hop.ring_cpu_us > 0 and len(hop.ring_us) == len(hop.connection_us)
            for hop in each.hops
        )


@pytest.mark.parametrize(("ring_us", "met"), [(100.0, True), (90.0 * 2 / TARGET, False)])
def test_ring_must_be_faster_than_the_connection_at_the_default_size(
    ring_us: float, met: bool
) -> None:
    assert THRESHOLD_KIB << 10 == MIN_BLOCK_BYTES
    hops = tuple(
        HopSamples(
            kib=kib,
            connection_us=(160.0,),
            ring_us=(ring_us,),
            connection_cpu_us=1.0,
            ring_cpu_us=1.0,
        )
        for kib in (16, THRESHOLD_KIB)
    )
    result = SpanHopsResult(
        transports=tuple(TransportHops(transport=each, hops=hops) for each in (HOST, TCP))
    )
    (target,) = result.targets()
    assert target.met == met and target.value == pytest.approx(160 / ring_us)
