"""Background jobs through a real worker process: submitted, run, failed, interrupted, listed."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis
from rq.job import JobStatus

from fleet.control.jobs import delete, job, jobs, open_queue, stop, submit
from fleet.core.errors import BadInput, Conflict
from fleet.core.telemetry import Job
from tests.support import run_cli, start_cli, wait_until


@pytest.fixture
def connection(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


def test_a_job_submitted_by_command_is_run_and_its_failure_listed(connection: Redis, redis_url: str, tmp_path: Path) -> None:
    env = {"REDIS_URL": redis_url}
    job = run_cli("jobs", "add", "bench", "--", "--no-such-option", cwd=tmp_path, env=env).stdout.strip()
    assert run_cli("jobs", "list", cwd=tmp_path, env=env).stdout == f"{job}  bench    queued\n"
    with start_cli("jobs", cwd=tmp_path, env=env) as worker:
        wait_until(lambda: jobs(connection)[0].state == "failed", "the job to fail", timeout_s=60)
        assert worker.stop() == 0
    shown = run_cli("jobs", "list", cwd=tmp_path, env=env).stdout
    assert shown.startswith(f"{job}  bench    failed") and "no-such-option" in shown


def test_a_finished_job_keeps_what_it_printed(connection: Redis, redis_url: str, tmp_path: Path) -> None:
    submit(connection, "bench", ["--help"])
    with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}):
        wait_until(lambda: jobs(connection)[0].state == "finished", "the job to finish", timeout_s=60)
    (done,) = jobs(connection)
    assert done.arguments == ("--help",)
    assert "fleet bench" in str(json.loads(done.result)["output"])


def test_a_stopped_worker_ends_its_job_which_counts_as_failed(connection: Redis, redis_url: str, tmp_path: Path) -> None:
    job = open_queue(connection).enqueue("time.sleep", 600)
    with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}) as worker:
        wait_until(lambda: job.get_status(refresh=True) == JobStatus.STARTED, "the job to start", timeout_s=30)
        wait_until(psutil.Process(worker.process.pid).children, "the job's own process")
        family = psutil.Process(worker.process.pid).children(recursive=True)
        assert worker.stop() == 0
    assert job.get_status(refresh=True) == JobStatus.FAILED
    wait_until(lambda: not any(process.is_running() for process in family), "the job's process to be gone")


def test_an_unknown_kind_is_refused_with_the_kinds_there_are(connection: Redis) -> None:
    with pytest.raises(BadInput, match="unknown kind of job 'nothing'; use one of bench"):
        submit(connection, "nothing", [])


def test_a_running_job_is_stopped_with_all_it_started(connection: Redis, redis_url: str, tmp_path: Path) -> None:
    """By the gateway's port, over a real worker: the benchmark hangs on a server that never answers, until it is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hanging = submit(connection, "bench", ["--url", url])
        waiting = submit(connection, "bench", ["--help"])
        with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}) as worker:
            caller, _ = silent.accept()
            family = psutil.Process(worker.process.pid).children(recursive=True)
            assert any("bench" in process.cmdline() for process in family), "the benchmark is a process of its own"
            with pytest.raises(Conflict, match="runs; stop it first"):
                delete(connection, hanging.id)
            stop(connection, hanging.id)
            wait_until(lambda: view(connection, hanging.id).state == "stopped", "the job to be stopped", timeout_s=30)
            wait_until(lambda: not any(process.is_running() for process in family), "all of its processes to be gone")
            wait_until(lambda: view(connection, waiting.id).state == "finished", "the next job to run", timeout_s=60)
            caller.close()
            with pytest.raises(Conflict, match="ended already: stopped"):
                stop(connection, hanging.id)
            delete(connection, hanging.id)
            assert [one.id for one in jobs(connection)] == [waiting.id]
            assert worker.stop() == 0


def view(connection: Redis, job_id: str) -> Job:
    found = job(connection, job_id)
    assert found is not None
    return found
