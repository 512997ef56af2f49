"""`fleet up`: a whole fleet from one command, the death of a worker, and the end of every process."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from fleet.control.embedded import embedded_url
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import Running, redis_answers, run_cli, start_cli, wait_until

ROLES = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]
SETTINGS = ("checkpoint=tiny", "engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0")
OPTIONS = [word for setting in SETTINGS for word in ("--set", setting)]
"""No model and no NIXL, since both are slow to load and not tested here."""
START_S = 90.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Running]:
    with start_cli("up", *OPTIONS, cwd=tmp_path) as running:
        running.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        yield running


def test_fleet_up_serves_restarts_a_killed_worker_and_leaves_no_process(fleet: Running, tmp_path: Path) -> None:
    config = yaml.safe_load((tmp_path / ".fleet" / "resolved.yaml").read_text())
    url = fleet.wait_for(r"fleet: ready at (http://\S+)\n")[1]
    assert url == f"http://127.0.0.1:{config['web']['port']}"
    with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
        assert answer.status == 200
    assert Path(config["checkpoint"]).is_relative_to(tmp_path / ".fleet")

    env = {"FLEET_CONFIG": str(tmp_path / ".fleet" / "resolved.yaml")}
    status = json.loads(run_cli("status", "--json", cwd=tmp_path, env=env).stdout)
    pids = {worker["role"]: worker["pid"] for worker in status["workers"]}
    assert set(ROLES) <= set(pids) and not status["missing_roles"]

    family = psutil.Process(fleet.process.pid).children(recursive=True)
    killed = next(process for process in family if process.pid == pids[ROLES[0]])
    killed.kill()
    fleet.wait_for(f"worker {ROLES[0]} was killed by SIGKILL; restarting it")
    wait_until(lambda: _pid_of(ROLES[0], tmp_path, env) not in (None, killed.pid), "another worker to join", timeout_s=30)

    family = psutil.Process(fleet.process.pid).children(recursive=True)
    assert fleet.stop(timeout_s=30) == 0
    assert fleet.output().count("fleet: ready at") == 1
    wait_until(lambda: not [process for process in family if process.is_running()], "every process to be gone")


def _pid_of(role: str, folder: Path, env: dict[str, str]) -> int | None:
    """Return the pid of the role's newest worker: a killed one is listed until its lease ends."""
    status = json.loads(run_cli("status", "--json", cwd=folder, env=env).stdout)
    of_role = [worker for worker in status["workers"] if worker["role"] == role]
    return max(of_role, key=lambda worker: worker["started_us"])["pid"] if of_role else None


def test_process_that_cannot_start_is_named_and_stops_the_fleet(tmp_path: Path) -> None:
    broken = ("--set", f"checkpoint={_weightless(tmp_path / 'checkpoint')}", "--set", "engine=torch")
    done = run_cli("up", *OPTIONS, *broken, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert any(last.startswith(f"fleet: {role}.1 ended, ") for role in ROLES) or last.startswith("fleet: web ended, ")
    assert "everything else was stopped" in last


def test_served_data_folder_is_refused_before_any_change(tmp_path: Path) -> None:
    data = tmp_path / "served"
    with start_cli("redis", "--set", f"redis.data_dir={data}", cwd=tmp_path) as holder:
        wait_until(lambda: redis_answers(embedded_url(data)), "the first server to hold the folder")
        checkpoint = _weightless(tmp_path / "checkpoint")
        done = run_cli("up", *OPTIONS, "--set", f"redis.data_dir={data}", "--set", f"checkpoint={checkpoint}", cwd=tmp_path)
    assert done.returncode == 1
    assert f"{data} is already served by process {holder.process.pid}" in done.stderr
    assert not (tmp_path / ".fleet" / "resolved.yaml").exists()


def _weightless(folder: Path) -> Path:
    """Make a folder that is accepted as a checkpoint until its weights are read."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder
