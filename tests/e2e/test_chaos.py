"""`fleet chaos` as a command: a real fleet, a real model, real signals."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fleet.chaos.report import Verdict
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, FaultKind
from fleet.cli.main import app
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import run_cli

STAGES = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]
ROLES = [*STAGES, CONDUCTOR, GATEWAY]
SHORT = ("--requests", "4", "--concurrency", "4", "--how", "kill", "--spacing", "0.2", "--set", "lease.worker_ttl_s=20")
"""A lease that outlasts the run: each death is detected by its keeper."""


@pytest.mark.timeout(600)
def test_chaos_kill_of_each_role_loses_and_changes_nothing(tmp_path: Path) -> None:
    """Duration: less than a minute on two idle cores, several on busy ones."""
    reports = ("--json", "verdict.json", "--png", "verdict.png")
    done = run_cli("chaos", "--set", "checkpoint=tiny", *SHORT, *reports, cwd=tmp_path, timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chaos passed" in done.stdout

    verdict = msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.passed and not verdict.lost and not verdict.different and verdict.residue.is_empty
    assert sorted(fault.role for fault in verdict.faults) == sorted(ROLES)
    assert all(fault.kind == FaultKind.KILL and fault.recovered_s is not None for fault in verdict.faults)
    assert verdict.faults_by_role == {role: {"SIGKILL": 1} for role in verdict.faults_by_role}
    assert {kind.detected for kind in verdict.kinds if kind.role != CONDUCTOR} == {"died"}
    assert verdict.answered_greedy and verdict.answered_sampled
    assert verdict.numerics == "invariant"
    assert verdict.answered == len(verdict.disturbed) >= 4
    assert verdict.pauses_undisturbed.gap_s is not None
    assert (tmp_path / "verdict.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / ".fleet").glob("bench-*")), "the data folder of the run is removed"
    assert not list((tmp_path / ".fleet").glob("chaos-*.log")), "the log is saved only if the run failed"


def test_chaos_help_shows_example_and_exit_status() -> None:
    done = CliRunner().invoke(app, ["chaos", "--help"], env={"COLUMNS": "140"})
    assert done.exit_code == 0
    assert "fleet chaos --set checkpoint=tiny" in done.output and "Exit status" in done.output


def test_chaos_unknown_role_is_one_line(tmp_path: Path) -> None:
    done = run_cli("chaos", "--roles", "conductor,unknown", cwd=tmp_path, timeout_s=110)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"fleet: --roles conductor,unknown: 'unknown' is unknown; use one or more of {', '.join(ROLES)}"
    ]
