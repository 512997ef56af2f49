"""`fleet chaos` as a command, with a real fleet, a real model and real signals."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.lab.faults.audio_calls import SPEECH, TRANSCRIPTION
from fleet.lab.faults.schedule import CONDUCTOR, GATEWAY, REDIS, REDIS_KINDS, FaultKind
from fleet.lab.faults.soak_report import SoakVerdict
from fleet.lab.faults.verdict import Verdict
from tests.support import REPO, run_cli, set_options

STAGES = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]
ROLES = [*STAGES, CONDUCTOR, GATEWAY]
SHORT = "--requests 4 --concurrency 4 --how kill --spacing 0.2 --set lease.worker_ttl_s=20".split()
"""Options of a short run, with a lease that outlasts it, so that each death is detected by the
process's keeper.
"""


def passed_verdict(folder: Path) -> Verdict:
    """Return the verdict of the run in `folder`, and check that nothing was lost, different or
    left.
    """
    verdict = msgspec.json.decode((folder / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.passed and not verdict.lost and not verdict.different
    assert verdict.residue.is_empty
    return verdict


@pytest.mark.one_in(6, "commands that take minutes")
@pytest.mark.timeout(600)
def test_chaos_kill_of_each_role_loses_and_changes_nothing(tmp_path: Path) -> None:
    """Killing a worker of each role loses and changes nothing. Duration: less than a minute on two
    idle cores, several minutes on busy ones.
    """
    reports = "--json verdict.json --png verdict.png".split()
    done = run_cli(
        "chaos", "--set", "checkpoint=tiny", *SHORT, *reports, cwd=tmp_path, timeout_s=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chaos passed" in done.stdout

    verdict = passed_verdict(tmp_path)
    assert sorted(fault.role for fault in verdict.faults) == sorted(ROLES)
    assert all(
        fault.kind == FaultKind.KILL and fault.recovered_s is not None for fault in verdict.faults
    )
    assert verdict.faults_by_role == {role: {"SIGKILL": 1} for role in verdict.faults_by_role}
    assert {kind.detected for kind in verdict.kinds if kind.role != CONDUCTOR} == {"died"}
    assert verdict.answered_greedy and verdict.answered_sampled
    assert verdict.numerics == "invariant"
    assert verdict.answered == len(verdict.disturbed) >= 4
    assert verdict.pauses_undisturbed.gap_s is not None
    assert (tmp_path / "verdict.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / ".fleet").glob("bench-*")), "the data folder of the run is removed"
    assert not list((tmp_path / ".fleet").glob("chaos-*.log")), (
        "the log is saved only if the run failed"
    )


def spoken_run(*options: str, folder: Path, timeout_s: float) -> Verdict:
    """Run `fleet chaos` with Redis faults during requests and voice sessions, on the fake engine;
    return the verdict.
    """
    paced = (
        f"stages.{stage.name}.extra.step_ms=30"
        for stage in GRAPHS[DEFAULT_GRAPH].stages
        if stage.default_sampling
    )
    fake = set_options("engine=fake", "device=cpu", "transfer.kind=redis", *paced)
    done = run_cli(
        "chaos", *fake, *options, "--json", "verdict.json", cwd=folder, timeout_s=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = passed_verdict(folder)
    assert all(fault.role == REDIS and fault.recovered_s is not None for fault in verdict.faults)
    assert all(session.turns and not session.forgotten for session in verdict.sessions)
    assert not any(
        turn.lost or turn.different for session in verdict.sessions for turn in session.turns
    )
    assert not list((folder / ".fleet").glob("bench-redis-*")), (
        "the data of the run's Redis is removed"
    )
    return verdict


@pytest.mark.one_in(6, "commands that take minutes")
@pytest.mark.timeout(600)
def test_chaos_kills_lose_and_change_nothing_where_stages_hear_and_speak(tmp_path: Path) -> None:
    """Real speech in and out: typed and spoken chats and voice turns, speech and transcriptions."""
    graph = ["--config", str(REPO / "configs" / "cascade.yaml"), "--set", "checkpoint=tiny"]
    done = run_cli(
        "chaos",
        *graph,
        *SHORT,
        "--voice",
        "1",
        "--json",
        "verdict.json",
        cwd=tmp_path,
        timeout_s=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = passed_verdict(tmp_path)
    stages = {stage.name for stage in GRAPHS["cascade"].stages}
    assert {fault.role for fault in verdict.faults} == {*stages, CONDUCTOR, GATEWAY}
    assert {call.kind for call in verdict.audio_calls} == {SPEECH, TRANSCRIPTION}
    assert not any(call.lost or call.different for call in verdict.audio_calls)
    assert all(session.turns and not session.forgotten for session in verdict.sessions)


@pytest.mark.one_in(6, "commands that take minutes")
@pytest.mark.timeout(400)
def test_chaos_pauses_and_hangs_lose_and_change_nothing(tmp_path: Path) -> None:
    """Pauses and hangs lose and change nothing: short and long pauses, of one process and of all
    workers, and processes that only their keepers can end.
    """
    kinds = "--how pause,hang --roles thinker,conductor,web --kills 9 --spacing 0.2".split()
    load = "--requests 4 --concurrency 4 --json verdict.json".split()
    fake = set_options("engine=fake", "device=cpu", "transfer.kind=redis")
    done = run_cli("chaos", *fake, *kinds, *load, cwd=tmp_path, timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = passed_verdict(tmp_path)
    assert Counter(fault.kind for fault in verdict.faults).keys() == {
        FaultKind.PAUSE,
        FaultKind.HANG,
    }
    assert all(fault.recovered_s is not None for fault in verdict.faults)


@pytest.mark.one_in(6, "commands that take minutes")
@pytest.mark.timeout(300)
def test_chaos_faults_in_redis_lose_no_answer_and_no_turn(tmp_path: Path) -> None:
    options = "--how readonly,tail --requests 4 --concurrency 4 --voice 2 --spacing 0.2".split()
    verdict = spoken_run(*options, folder=tmp_path, timeout_s=280)
    assert {fault.kind for fault in verdict.faults} == {FaultKind.READONLY, FaultKind.TAIL}
    assert len(verdict.sessions) == 2


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_chaos_five_faults_of_each_kind_in_redis_lose_no_answer_and_no_turn(tmp_path: Path) -> None:
    options = "--how redis --kills-per-role 5 --requests 8 --concurrency 8 --voice 4".split()
    verdict = spoken_run(*options, folder=tmp_path, timeout_s=3500)
    assert Counter(fault.kind for fault in verdict.faults) == dict.fromkeys(REDIS_KINDS, 5)


@pytest.mark.one_in(6, "commands that take minutes")
@pytest.mark.timeout(400)
def test_soak_reports_memory_files_and_threads_over_time(tmp_path: Path) -> None:
    """A soak run reports memory, files and threads over time. This run is too short for a verdict
    on growth: processes are still warming up.
    """
    options = "--soak 300 --minutes 0.5 --json soak.json --png soak.png".split()
    done = run_cli("chaos", *options, cwd=tmp_path, timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = msgspec.json.decode((tmp_path / "soak.json").read_bytes(), type=SoakVerdict)
    counts = verdict.counts
    assert (
        counts.answered + counts.aborted == 300 and counts.aborted > 0 and verdict.residue.is_empty
    )
    assert not counts.lost and not counts.different
    assert verdict.kills and {role for _, role in verdict.kills} <= {*STAGES, GATEWAY}
    assert {"conductor", "web", *(f"worker {stage}" for stage in STAGES)} <= {
        process.kind for process in verdict.samples[-1].processes
    }
    assert {"Redis: memory", "Redis: keys", "web: RSS", "conductor: threads"} <= {
        change.name for change in verdict.changes
    }
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert "a quarter of the way" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["spans_forward.yaml", "spans_reverse.yaml"])
@pytest.mark.timeout(900)
def test_chaos_kills_and_freezes_in_saves_leave_whole_files(file: str, tmp_path: Path) -> None:
    options = "--roles lm,lm.span --how kill,stop --kills 12 --requests 8 --concurrency 4".split()
    quick = "--set lease.worker_ttl_s=3 --spacing 0.5 --json verdict.json --config".split()
    config = str(REPO / "configs" / file)
    done = run_cli("chaos", *options, *quick, config, cwd=tmp_path, timeout_s=880)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = passed_verdict(tmp_path)
    assert verdict.aimed == {"save": 6} and verdict.in_moment.get("save", 0) >= 1
    assert (
        verdict.saves is not None
        and verdict.saves.struck
        and verdict.saves.whole
        and not verdict.saves.wrong
    )
    assert "saved conversations under faults" in done.stdout


def test_chaos_help_shows_example_and_exit_status() -> None:
    done = CliRunner().invoke(app, ["chaos", "--help"], env={"COLUMNS": "140"})
    assert done.exit_code == 0
    assert "fleet chaos --set checkpoint=tiny" in done.output and "Exit status" in done.output


def test_chaos_unknown_role_is_one_line(tmp_path: Path) -> None:
    done = run_cli("chaos", "--roles", "conductor,unknown", cwd=tmp_path, timeout_s=110)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "fleet: --roles conductor,unknown: 'unknown' is unknown; use one or more of "
        f"{', '.join(ROLES)}"
    ]
