"""What splitting costs and what it buys, measured by the command on small fleets of its own: the reports are whole.

No number is held to anything here.
"""

from pathlib import Path

import msgspec
import pytest

from fleet.bench import interference, kv_pages
from fleet.bench.main import run
from fleet.bench.report import BenchReport
from tests.unit.test_bench_run import PNG

SMALL = ("graph=text", "checkpoint=tiny", "device=cpu")


class File(msgspec.Struct):
    report: BenchReport


def bench(folder: Path, *words: str) -> BenchReport:
    out, picture = folder / "out.json", folder / "out.png"
    sets = [word for setting in (*SMALL, f"data_dir={folder}") for word in ("--set", setting)]
    assert run([*words, *sets, "--json", str(out), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
    return msgspec.json.decode(out.read_bytes(), type=File).report


@pytest.mark.timeout(600)
def test_hand_offs_are_told_by_the_fleet_s_own_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pages, "NUM_REPEATS", 2)
    found = bench(tmp_path, "--hand-off", "--hand-offs", "3").hand_offs
    assert found is not None and found.pages is not None
    (stage,) = found.stages
    assert stage.stage == "lm" and len(stage.hand_offs) == 3 and stage.first is not None
    for told in stage.hand_offs:
        assert told.pulled_us is not None and told.confirmed_us is not None and told.resumed_us is not None
        assert told.prefilled_us < told.handed_us < told.claimed_us < told.opened_us <= told.pulled_us < told.confirmed_us
        assert told.confirmed_us <= told.resumed_us
    pages = found.pages
    assert pages.num_bytes >= 16 * 1024 * 1024 and pages.num_blocks > 1 and pages.ratio > 0
    assert len(pages.blocks_us) == len(pages.plain_us) == len(pages.copied_us) == 2


@pytest.mark.timeout(600)
def test_long_prompts_come_while_answers_run_together_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "PEACE_S", 1.0)
    monkeypatch.setattr(interference, "STEADY_TOKENS", 64)
    words = ("--interference", "--concurrency", "2", "--requests", "3", "--prompt-tokens", "600")
    found = bench(tmp_path, *words).interference
    assert found is not None and found.ratio is not None and found.ratio > 0
    assert found.together.workers == {"lm": 2}
    assert found.split.workers == {"lm.prefill": 1, "lm.decode": 1}
    assert 300 < found.num_tokens <= 900 and found.interval_s > 0
    for side in (found.together, found.split):
        assert len(side.long_prompts) == 3 and side.peace and side.train
        assert max(gap.at_s for gap in side.peace) < min(gap.at_s for gap in side.train)
