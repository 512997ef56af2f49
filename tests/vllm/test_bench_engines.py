"""The engine benchmark on the tiny model: its report is complete. No number is checked against a
target.
"""

from pathlib import Path

import pytest

from fleet.lab.measure import engines
from fleet.lab.measure.engines import ON_VLLM, TORCH, VLLM, EngineComparison
from tests.bench_reports import run_bench
from tests.support import set_options


@pytest.mark.timeout(600)
def test_engine_benchmark_reports_every_engine_at_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "BATCHES": (1, 3),
        "FLEET_BATCHES": (3,),
        "NUM_TOKENS": 8,
        "NUM_RUNS": 2,
    }.items():
        monkeypatch.setattr(engines, name, value)
    settings = set_options("graph=text", "device=cpu", f"data_dir={tmp_path}")
    picture = ("--png", str(tmp_path / "out.png"))
    found = run_bench(tmp_path, EngineComparison, "engines", "--engines", *settings, *picture)
    assert found.num_equal == found.num_answers == 8
    measured = {(speed.name, speed.batch): speed for speed in found.speeds}
    assert measured.keys() == {(TORCH, 1), (TORCH, 3), (VLLM, 1), (VLLM, 3), (ON_VLLM, 3)}
    assert all(
        speed.num_tokens == 8 * speed.batch and len(speed.seconds) == 1
        for speed in measured.values()
    )
    assert len(found.targets()) == 3
