"""`fleet chaos` on two vLLM workers: SIGKILL again and again under load."""

from pathlib import Path

import msgspec
import pytest

from fleet.chaos.report import Verdict
from fleet.chaos.requests import is_sampled
from tests.support import run_cli, set_options
from tests.vllm.fleets import ON_VLLM, TEXT_FILE

NUM_KILLS = 10
LOAD = ("--roles", "lm", "--how", "kill", "--kills", str(NUM_KILLS), "--requests", "8", "--concurrency", "4", "--spacing", "0.5")
SETTINGS = set_options(*ON_VLLM, "numerics=fast", "lease.worker_ttl_s=20")
"""A lease that outlasts the run: each death is detected by its keeper."""


@pytest.mark.timeout(1500)
def test_ten_killed_workers_lose_and_change_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer sampled with a seed differs after a death, since vLLM's noise is keyed by the tokens that one engine drew."""
    done = run_cli("chaos", *TEXT_FILE, *SETTINGS, *LOAD, "--json", "verdict.json", cwd=tmp_path, timeout_s=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.passed and not verdict.lost and not verdict.changed and verdict.residue.is_empty
    assert verdict.faults_by_role == {"lm": {"SIGKILL": NUM_KILLS}}
    assert sum(len(fault.requests) for fault in verdict.faults) > 0, "requests were running on the killed workers"
    assert [outcome.request for outcome in verdict.different if not is_sampled(outcome.request)] == []
    sampled = f"{len(verdict.different)} of {verdict.answered_sampled} sampled answers differ"
    with capsys.disabled():
        print(f"\n{NUM_KILLS} kills: {verdict.answered} answers, 0 lost, 0 of {verdict.answered_greedy} greedy differ; {sampled}")
