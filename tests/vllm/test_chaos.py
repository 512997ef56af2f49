"""`fleet chaos` on vLLM workers: repeated SIGKILL under load."""

from pathlib import Path

import msgspec
import pytest

from fleet.lab.faults.verdict import Verdict
from tests.support import run_cli, set_options
from tests.vllm.fleets import ON_VLLM, SPLIT, TEXT_FILE

LOAD = ("--how", "kill", "--requests", "8", "--concurrency", "4", "--spacing", "0.5")
SETTINGS = (*ON_VLLM, "numerics=fast", "lease.worker_ttl_s=20")
"""Settings with a lease that outlasts the run, so that each death is detected by the worker's
keeper.
"""
NUM_KILLS, NUM_IN_SHORT = 10, 2


def assert_nothing_lost(
    folder: Path, capsys: pytest.CaptureFixture[str], roles: tuple[str, ...], kills: int, *more: str
) -> None:
    """Run `fleet chaos` with two workers per role, kill workers of each role, and check that
    nothing is lost.
    """
    arguments = (
        "--roles",
        ",".join(roles),
        "--kills-per-role",
        str(kills),
        *LOAD,
        "--json",
        "verdict.json",
    )
    done = run_cli(
        "chaos", *TEXT_FILE, *set_options(*SETTINGS, *more), *arguments, cwd=folder, timeout_s=2300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = msgspec.json.decode((folder / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.passed and not verdict.lost and not verdict.changed and verdict.residue.is_empty
    assert verdict.faults_by_role == {role: {"SIGKILL": kills} for role in roles}
    assert sum(len(fault.requests) for fault in verdict.faults) > 0, (
        "requests were running on the killed workers"
    )
    assert verdict.answered_greedy and verdict.answered_sampled and not verdict.different
    with capsys.disabled():
        print(
            f"\n{kills} kills of each of {', '.join(roles)}: {verdict.answered} answers, 0 "
            "lost, 0 different"
        )


@pytest.mark.timeout(2400)
def test_ten_killed_workers_lose_and_change_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_nothing_lost(tmp_path, capsys, ("lm",), NUM_KILLS)


@pytest.mark.timeout(2400)
def test_killed_workers_of_both_halves_lose_and_change_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, thorough: bool
) -> None:
    """Killed workers of both roles lose and change no answer. Duration: twenty kills take a quarter
    of an hour.
    """
    kills = NUM_KILLS if thorough else NUM_IN_SHORT
    assert_nothing_lost(tmp_path, capsys, ("lm.prefill", "lm.decode"), kills, *SPLIT)
