"""The benchmark of voice beside a batch on a small fleet: every question is answered, and lines are
answered meanwhile. First sounds depend on the machine, so they are measured and not tested.
"""

from pathlib import Path

import pytest

from fleet.lab.measure.voice_beside_batch import ROUNDS, VoiceBesideBatch
from tests.bench_reports import read_result
from tests.support import run_cli

SESSIONS, TURNS = 2, 1


@pytest.mark.one_in(11, "benchmarks")
def test_questions_alone_and_beside_a_batch_are_answered_and_lines_too(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--sessions", str(SESSIONS), "--requests", str(TURNS), "--lines", "40")
    done = run_cli(
        "bench",
        "--voice-beside-batch",
        *arguments,
        "--engine",
        "fake",
        "--json",
        str(out),
        cwd=tmp_path,
        timeout_s=240,
    )
    assert done.returncode == 0, done.stderr
    found = read_result(out, VoiceBesideBatch, "voice_beside_batch")
    assert not found.faults
    for turns in (found.alone, found.beside):
        assert [len(each.turns) for each in turns.sessions] == [TURNS] * SESSIONS * ROUNDS
    assert found.num_answered > 0 and found.beside_s > 0
    assert "lines answered beside voice" in done.stdout
