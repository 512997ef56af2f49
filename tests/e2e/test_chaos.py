"""`fleet chaos` as a person runs it: a real fleet, a real model, real signals, and every byte where it belongs."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fleet.chaos.report import Verdict
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, How
from fleet.cli.main import app
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import run_cli

STAGES = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]
ROLES = [*STAGES, CONDUCTOR, GATEWAY]
SHORT = ("--requests", "4", "--concurrency", "4", "--how", "kill", "--spacing", "0.2", "--set", "lease.worker_ttl_s=20")
"""With a lease that outlasts a pause: a death that was found was seen."""


@pytest.mark.timeout(600)
def test_a_kill_of_each_role_loses_and_changes_nothing(tmp_path: Path) -> None:
    """On two idle cores this takes less than a minute; on busy ones it may take several."""
    reports = ("--json", "verdict.json", "--png", "verdict.png")
    done = run_cli("chaos", "--set", "checkpoint=tiny", *SHORT, *reports, cwd=tmp_path, timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chaos passed" in done.stdout

    verdict = msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.passed and not verdict.lost and not verdict.different and verdict.residue.nothing
    assert sorted(hit.role for hit in verdict.hits) == sorted(ROLES)
    assert all(hit.how == How.KILL and hit.whole_s is not None for hit in verdict.hits)
    assert verdict.struck_roles == {role: {"SIGKILL": 1} for role in verdict.struck_roles}
    assert {kind.found for kind in verdict.kinds if kind.role != CONDUCTOR} == {"died"}, "each was seen to die by its keeper"
    assert verdict.answered_greedy and verdict.answered_drawn
    assert verdict.numerics == "invariant"
    assert verdict.answered == len(verdict.disturbed) >= 4
    assert verdict.pauses_undisturbed.gap_s is not None
    assert (tmp_path / "verdict.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / ".fleet").glob("bench-*")), "its own data folder goes with it"
    assert not list((tmp_path / ".fleet").glob("chaos-*.log")), "lines are kept only for a run that failed"


def test_help_teaches() -> None:
    done = CliRunner().invoke(app, ["chaos", "--help"], env={"COLUMNS": "140"})
    assert done.exit_code == 0
    assert "fleet chaos --set checkpoint=tiny" in done.output and "Exit status" in done.output


def test_a_bad_option_is_one_line(tmp_path: Path) -> None:
    done = run_cli("chaos", "--roles", "conductor,nobody", cwd=tmp_path, timeout_s=110)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"fleet: --roles conductor,nobody: 'nobody' is not known; use one or more of {', '.join(ROLES)}"
    ]
