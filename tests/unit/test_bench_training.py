"""The benchmark of training beside answers: as a command at the small size, and its targets."""

from pathlib import Path

import pytest

from fleet.lab.measure.training import CapturedRounds, TrainingCosts
from tests.bench_reports import run_bench


@pytest.mark.one_in(11, "benchmarks")
@pytest.mark.timeout(300)
def test_small_measurement_reports_captures_and_exchanges(tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(f"{{data_dir: {tmp_path / 'data'}, checkpoint: tiny}}\n")
    arguments = ("--training", "--small", "--config", str(config))
    result = run_bench(tmp_path, TrainingCosts, "training", *arguments)
    assert [one.trains for one in result.rounds] == [False, True]
    assert all(one.captures and len(one.plain) == len(one.captured) == 1 for one in result.rounds)
    assert result.undisturbed_s and result.exchanging_s and result.exchanges == 3


def test_targets_are_the_median_of_the_ratios_and_the_added_gap() -> None:
    rounds = tuple(
        CapturedRounds(
            trains=trains,
            plain=(100.0, 200.0, 300.0),
            captured=(96.0, 180.0, 297.0),
            captures=1,
            shed=2,
        )
        for trains in (False, True)
    )
    costs = TrainingCosts(
        share=0.25,
        concurrency=8,
        rounds=rounds,
        undisturbed_s=(0.01,) * 100,
        exchanging_s=(*(0.01,) * 90, *(0.07,) * 10),
        exchanges=10,
        others_cores=(None,),
    )
    capture, gap = costs.targets()
    assert capture.value == pytest.approx(0.96) and capture.met
    assert gap.value == pytest.approx(60) and not gap.met
