"""The hand-off and interference benchmarks on small fleets: the reports are complete. No number is
checked against a target.
"""

from pathlib import Path

import msgspec
import pytest

from fleet.lab.measure import interference, kv_pages
from fleet.lab.measure.main import run
from fleet.lab.measure.report import BenchFile, BenchReport
from tests.unit.test_bench_run import PNG

SMALL = ("graph=text", "checkpoint=tiny", "device=cpu")


def bench(folder: Path, *arguments: str) -> BenchReport:
    out, picture = folder / "out.json", folder / "out.png"
    settings = [
        argument for setting in (*SMALL, f"data_dir={folder}") for argument in ("--set", setting)
    ]
    assert run([*arguments, *settings, "--json", str(out), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
    return msgspec.json.decode(out.read_bytes(), type=BenchFile).report


@pytest.mark.one_in(5, "benchmarks")
@pytest.mark.timeout(600)
def test_hand_off_benchmark_reports_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pages, "NUM_REPEATS", 2)
    found = bench(tmp_path, "--hand-off", "--hand-offs", "3").hand_offs
    assert found is not None and found.pages is not None
    (stage,) = found.stages
    assert stage.stage == "lm" and len(stage.hand_offs) == 3 and stage.first is not None
    for hand_off in stage.hand_offs:
        assert (
            hand_off.pulled_us is not None
            and hand_off.confirmed_us is not None
            and hand_off.resumed_us is not None
        )
        assert (
            hand_off.prefilled_us
            < hand_off.handed_us
            < hand_off.claimed_us
            < hand_off.opened_us
            <= hand_off.pulled_us
            < hand_off.confirmed_us
        )
        assert hand_off.confirmed_us <= hand_off.resumed_us
    pages = found.pages
    assert pages.num_bytes >= 16 * 1024 * 1024 and pages.num_blocks > 1 and pages.ratio > 0
    assert len(pages.blocks_us) == len(pages.plain_us) == len(pages.copied_us) == 2


@pytest.mark.one_in(5, "benchmarks")
@pytest.mark.timeout(600)
def test_interference_benchmark_reports_gaps_together_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "UNDISTURBED_S", 1.0)
    monkeypatch.setattr(interference, "STEADY_TOKENS", 64)
    arguments = (
        "--interference",
        "--concurrency",
        "2",
        "--requests",
        "3",
        "--prompt-tokens",
        "600",
    )
    found = bench(tmp_path, *arguments).interference
    assert found is not None and found.ratio is not None and found.ratio > 0
    assert found.together.workers == {"lm": 2}
    assert found.split.workers == {"lm.prefill": 1, "lm.decode": 1}
    assert 300 < found.num_tokens <= 900 and found.interval_s > 0
    for side in (found.together, found.split):
        assert len(side.long_prompts) == 3 and side.undisturbed and side.disturbed
        assert max(gap.at_s for gap in side.undisturbed) < min(gap.at_s for gap in side.disturbed)
