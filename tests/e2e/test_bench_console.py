"""The benchmark of open console pages on a small fleet: every page receives something, the list
shows answers, and every kill is shown. Times depend on the machine, so they are measured and not
tested.
"""

from pathlib import Path

import pytest

from fleet.lab.measure.console_pages import DEATHS_ON, KILLS, ROOMS, ConsolePagesResult
from tests.bench_reports import read_result
from tests.support import run_cli


@pytest.mark.one_in(11, "benchmarks")
def test_pages_show_answers_and_deaths_beside_live_answers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--pages", str(len(ROOMS)), "--answers", "4", "--json", str(out))
    done = run_cli("bench", "--console", *arguments, cwd=tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stderr
    found = read_result(out, ConsolePagesResult, "console_pages")
    assert set(found.kb_s) == set(ROOMS) and all(found.kb_s[room] > 0 for room in DEATHS_ON)
    assert found.answers_s and min(found.answers_s) > 0
    assert len(found.deaths_s) == KILLS * len(DEATHS_ON)
    assert "for each page" in done.stdout
