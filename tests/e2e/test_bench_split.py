"""The hand-off and interference benchmarks on small fleets: their reports are complete. No number
is checked against a target.
"""

from pathlib import Path

import pytest

from fleet.lab.measure import interference, kv_pages
from fleet.lab.measure.hand_off import HandOffResult
from fleet.lab.measure.interference import Interference
from tests.bench_reports import PNG, ResultT, run_bench
from tests.support import set_options

SMALL = ("graph=text", "checkpoint=tiny", "device=cpu")


def bench(folder: Path, kind: type[ResultT], key: str, *arguments: str) -> ResultT:
    settings = set_options(*SMALL, f"data_dir={folder}")
    picture = folder / "out.png"
    found = run_bench(folder, kind, key, *arguments, *settings, "--png", str(picture))
    assert picture.read_bytes().startswith(PNG)
    return found


@pytest.mark.one_in(11, "benchmarks")
@pytest.mark.timeout(600)
def test_hand_off_benchmark_reports_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pages, "NUM_REPEATS", 2)
    found = bench(tmp_path, HandOffResult, "hand_offs", "--hand-off", "--hand-offs", "3")
    assert found.pages is not None
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


@pytest.mark.one_in(11, "benchmarks")
@pytest.mark.timeout(600)
def test_interference_benchmark_reports_gaps_together_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "UNDISTURBED_S", 1.0)
    monkeypatch.setattr(interference, "STEADY_TOKENS", 64)
    arguments = "--interference --concurrency 2 --requests 3 --prompt-tokens 600".split()
    found = bench(tmp_path, Interference, "interference", *arguments)
    assert found.ratio is not None and found.ratio > 0
    assert found.together.workers == {"lm": 2}
    assert found.split.workers == {"lm.prefill": 1, "lm.decode": 1}
    assert 300 < found.num_tokens <= 900 and found.interval_s > 0
    for side in (found.together, found.split):
        assert len(side.long_prompts) == 3 and side.undisturbed and side.disturbed
        assert max(gap.at_s for gap in side.undisturbed) < min(gap.at_s for gap in side.disturbed)
