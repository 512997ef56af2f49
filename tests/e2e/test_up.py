"""`fleet up`: a whole fleet started by one command, the death of a worker, and the end of every
process.
"""

import json
from pathlib import Path
from typing import Any

import httpx

from fleet.control.embedded import embedded_url
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.e2e.fleets import FAKE, START_S, ProcessFleet, fleet_up
from tests.support import redis_answers, run_cli, set_options, start_cli, wait_until

ROLES = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]


def test_fleet_up_serves_restarts_a_killed_worker_and_leaves_no_process(tmp_path: Path) -> None:
    with fleet_up(tmp_path, *FAKE, "checkpoint=tiny") as fleet:
        assert fleet.url == f"http://127.0.0.1:{fleet.config.web.port}"
        assert httpx.get(f"{fleet.url}/ready", timeout=5).status_code == 200
        assert Path(fleet.config.checkpoint).is_relative_to(tmp_path / ".fleet")
        status = _status(fleet)
        pids = {worker["role"]: worker["pid"] for worker in status["workers"]}
        assert set(ROLES) <= set(pids) and not status["missing_roles"]

        killed = next(process for process in fleet.family() if process.pid == pids[ROLES[0]])
        killed.kill()
        fleet.running.wait_for(f"worker {ROLES[0]} was killed by SIGKILL; restarting it")
        wait_until(
            lambda: _pid_of(ROLES[0], fleet) not in (None, killed.pid),
            "another worker to join",
            timeout_s=30,
        )

        family = fleet.family()
        assert fleet.running.stop(timeout_s=30) == 0
    assert fleet.running.output().count("fleet: ready at") == 1
    wait_until(
        lambda: not [process for process in family if process.is_running()],
        "every process to be gone",
    )


def test_ordered_numbers_start_workers_and_let_them_leave(tmp_path: Path) -> None:
    role = ROLES[-1]
    with fleet_up(tmp_path, *FAKE, "checkpoint=tiny") as fleet:
        first = _pid_of(role, fleet)
        assert run_cli("scale", f"{role}=2", cwd=fleet.folder, env=fleet.env).returncode == 0
        wait_until(lambda: len(_serving(role, fleet)) == 2, "a second worker", timeout_s=START_S)
        (view,) = [each for each in _status(fleet)["roles"] if each["role"] == role]
        assert (view["wanted"], view["managed"], view["placed"]) == (2, True, 2)

        killed = next(p for p in fleet.family() if p.pid == _pid_of(role, fleet))
        killed.kill()
        wait_until(
            lambda: len(_serving(role, fleet) - {killed.pid}) == 2,
            "the added worker to be restarted",
            timeout_s=START_S,
        )
        answer = httpx.put(f"{fleet.url}/v1/fleet/roles/{role}", json={"replicas": 1}, timeout=10)
        assert answer.json() == {"id": role, "object": "fleet.role", "replicas": 1}
        fleet.running.wait_for(f"{role}.2 finishes its tasks and leaves: 1 wanted here")
        wait_until(lambda: _serving(role, fleet) == {first}, "one to leave", timeout_s=60)
        fleet.running.wait_for(f"{role}.2 stopped \\(rc=0\\)")
        assert fleet.running.process.poll() is None, "the end of one worker ends no other"
        orders = httpx.get(f"{fleet.url}/v1/fleet/journal?what=ordered", timeout=10).json()["data"]
        assert [(entry["by"], entry["detail"]) for entry in reversed(orders)] == [
            ("fleet scale", "2 workers wanted"),
            ("", "1 worker wanted"),
            ("fleet up", "drain"),
        ]
        assert fleet.running.stop(timeout_s=30) == 0


def _serving(role: str, fleet: ProcessFleet) -> set[int]:
    """Return the pids of the role's workers that accept tasks."""
    return {
        worker["pid"]
        for worker in _status(fleet)["workers"]
        if worker["role"] == role and not worker["draining"] and worker["lease_left_s"] > 0
    }


def _status(fleet: ProcessFleet) -> dict[str, Any]:
    return json.loads(run_cli("status", "--json", cwd=fleet.folder, env=fleet.env).stdout)


def _pid_of(role: str, fleet: ProcessFleet) -> int | None:
    """Return the pid of the role's newest worker, since a killed one stays listed until its lease
    ends.
    """
    of_role = [worker for worker in _status(fleet)["workers"] if worker["role"] == role]
    return max(of_role, key=lambda worker: worker["started_us"])["pid"] if of_role else None


def test_process_that_cannot_start_is_named_and_stops_the_fleet(tmp_path: Path) -> None:
    settings = (*FAKE, f"checkpoint={_weightless(tmp_path / 'checkpoint')}", "engine=torch")
    done = run_cli("up", *set_options(*settings), cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert any(last.startswith(f"fleet: {role}.1 ended, ") for role in ROLES) or last.startswith(
        "fleet: web ended, "
    )
    assert "everything else was stopped" in last


def test_served_data_folder_is_refused_before_any_change(tmp_path: Path) -> None:
    data = tmp_path / "served"
    with start_cli("redis", "--set", f"redis.data_dir={data}", cwd=tmp_path) as holder:
        wait_until(lambda: redis_answers(embedded_url(data)), "the first server to hold the folder")
        settings = (
            *FAKE,
            f"redis.data_dir={data}",
            f"checkpoint={_weightless(tmp_path / 'checkpoint')}",
        )
        done = run_cli("up", *set_options(*settings), cwd=tmp_path)
    assert done.returncode == 1
    assert f"{data} is already served by process {holder.process.pid}" in done.stderr
    assert not (tmp_path / ".fleet" / "resolved.yaml").exists()


def _weightless(folder: Path) -> Path:
    """Create a folder that is accepted as a checkpoint until its weights are read."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder
