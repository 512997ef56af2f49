"""The speculation benchmark: as a command at the small size, and its target."""

from pathlib import Path

import pytest

from fleet.drafts.figures.speculation import DRAFTERS, EAGLE3, OFF
from fleet.lab.measure.speculation import (
    LOSS_TARGET,
    SPEEDS,
    DraftedRuns,
    SpeculationResult,
    TrainedHead,
)
from tests.bench_reports import run_bench


@pytest.mark.one_in(11, "benchmarks")
def test_small_measurement_reports_every_drafter_and_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--speculation", "--small")
    result = run_bench(tmp_path, SpeculationResult, "speculation", *arguments)
    assert "tokens per pass" in capsys.readouterr().out
    assert {(one.batch, one.drafter) for one in result.runs} == {
        (batch, name) for batch in (1, 4) for name in (OFF, *DRAFTERS)
    }
    assert all(one.num_equal == one.num_answers for one in result.runs)
    assert all(
        (one.acceptance_length > 1) == (one.drafter != OFF)
        for one in result.runs
        if one.batch == 1 and one.drafter != EAGLE3
    )
    assert result.head.windows > 0 and result.head.samples > 0 and result.head.refused == 0


HEAD = TrainedHead(windows=1, samples=8, refused=0, seconds=1.0, held_out=0.5)


def runs(drafter: str, *tokens_per_s: float, batch: int = 8) -> DraftedRuns:
    return DraftedRuns(
        numerics="fast",
        drafter=drafter,
        batch=batch,
        tokens_per_s=tokens_per_s,
        acceptance_length=1.5,
        shares=(0.5,),
        num_equal=3,
        num_answers=3,
    )


@pytest.mark.parametrize(("slowest", "met"), [(LOSS_TARGET, True), (LOSS_TARGET - 0.01, False)])
def test_target_is_the_median_of_the_ratios_of_each_round(slowest: float, met: bool) -> None:
    measured = (runs(OFF, 10.0, 20.0, 40.0), runs("ngram", 10 * slowest, 10.0, 80.0))
    target, differing = SpeculationResult(
        model="m", head=HEAD, runs=measured, others_cores=(None,)
    ).targets()
    assert target.value == pytest.approx(slowest) and target.met == met and differing.met


def test_trained_head_has_targets_of_its_own_for_one_answer() -> None:
    measured = (runs(OFF, 10.0, batch=1), runs(EAGLE3, 14.0, batch=1))
    speed, acceptance, _ = SpeculationResult(
        model="m", head=HEAD, runs=measured, others_cores=(None,)
    ).targets()
    assert speed.target == SPEEDS["fast"] and speed.met
    assert acceptance.value == 1.5 and not acceptance.met
