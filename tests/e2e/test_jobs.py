"""Background jobs through a real job-worker process: submitted, run, failed, interrupted,
listed.
"""

import datetime
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from redis import Redis
from rq import Callback, Worker
from rq.command import send_command
from rq.exceptions import StopRequested
from rq.job import Dependency
from rq.serializers import JSONSerializer

from fleet.control.job_files import read_file
from fleet.control.jobs import FUNCTIONS, QUEUE, delete, job, jobs, open_queue, stop, submit
from fleet.core.errors import Conflict
from fleet.core.jobs import BenchArguments
from fleet.jobs.record import JobRecord
from fleet.jobs.worker import JobWorker
from fleet.telemetry.views import Job
from tests.support import Running, command_line, run_cli, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")


@pytest.fixture
def connection(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


@contextmanager
def hanging_job(folder: Path, redis_url: str) -> Iterator[tuple[Running, list[psutil.Process]]]:
    """Run a job worker whose first job hangs on a gateway that never answers; yield the worker and
    its processes while it hangs.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f"web.port={server.getsockname()[1]}"
        with start_cli("jobs", "--set", port, cwd=folder, env={"REDIS_URL": redis_url}) as worker:
            caller, _ = server.accept()
            with caller:
                yield worker, psutil.Process(worker.process.pid).children(recursive=True)


def test_job_submitted_by_command_is_run_and_its_failure_listed(
    connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    env = {"REDIS_URL": redis_url}
    job = run_cli(
        "jobs", "submit", "bench", "requests=2", "check=true", cwd=tmp_path, env=env
    ).stdout.strip()
    assert run_cli("jobs", "list", cwd=tmp_path, env=env).stdout == f"{job}  bench    queued\n"
    assert jobs(connection)[0].arguments == BenchArguments(requests=2, check=True).as_json()
    with start_cli("jobs", "--url", "http://127.0.0.1:1", cwd=tmp_path, env=env) as worker:
        wait_until(lambda: jobs(connection)[0].state == "failed", "the job to fail", timeout_s=60)
        assert worker.stop() == 0
    shown = run_cli("jobs", "list", cwd=tmp_path, env=env).stdout
    assert shown.startswith(f"{job}  bench    failed") and "127.0.0.1:1" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "--json", "/tmp/x"), "'--json' is not NAME=VALUE"),
        (("json=/tmp/x",), "arguments.json: a bench job takes no argument of this name"),
        (("requests=0",), "arguments.requests: expected int >= 1"),
        (("streams=1,x", "measure=scale"), "arguments.streams: expected int, got str"),
    ],
)
def test_job_command_refuses_wrong_arguments(
    connection: Redis, redis_url: str, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    refused = run_cli("jobs", "submit", "bench", *words, cwd=tmp_path, env={"REDIS_URL": redis_url})
    assert refused.returncode != 0 and said in refused.stderr
    assert not jobs(connection)


def test_finished_job_leaves_its_report_in_its_own_folder(
    connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    job = submit(connection, "bench", {"measure": "hop", "hops": 20})
    data_dir = tmp_path / "data"
    with start_cli(
        "jobs", "--set", f"data_dir={data_dir}", cwd=tmp_path, env={"REDIS_URL": redis_url}
    ):
        wait_until(
            lambda: view(connection, job.id).state in ("finished", "failed"),
            "the job to end",
            timeout_s=60,
        )
        wait_until(
            lambda: not (data_dir / "jobs" / job.id / "tmp").exists(),
            "temporary files to be removed",
        )
    done = view(connection, job.id)
    assert done.state == "finished", done.traceback
    assert done.files == ("report.json", "report.png") and "hop" in str(
        json.loads(done.result)["output"]
    )
    assert json.loads(read_file(data_dir, job.id, "report.json"))["report"]["hops"]
    assert read_file(data_dir, job.id, "report.png").startswith(b"\x89PNG")
    assert [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.parent != data_dir / "jobs" / job.id
    ] == []


def test_job_records_not_written_by_submit_are_refused(
    connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Job records not written by `submit` are refused: records of an older version and hand-written
    ones with code, callbacks, a path as id, or invalid JSON.
    """
    queue, bench, target = open_queue(connection), FUNCTIONS["bench"], tmp_path / "written"
    limits = {"job_timeout": 60, "result_ttl": 600, "failure_ttl": 600}
    records = [
        queue.enqueue(bench, ["--hop", "--json", str(target)], **limits),
        queue.enqueue(bench, {"json": str(target)}, **limits),
        queue.enqueue("subprocess.call", ["touch", str(target)], **limits),
        queue.enqueue(bench, {"measure": "hop"}, on_failure=Callback("subprocess.call"), **limits),
        queue.enqueue(bench, {"measure": "hop"}, job_timeout=-1),
        queue.enqueue(bench, {"measure": "hop"}, job_id="____tmp", **limits),
    ]
    garbled = queue.enqueue(bench, {"measure": "hop"}, **limits)
    connection.hset(garbled.key, "data", b"no JSON")
    with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}) as worker:
        for record in (*records, garbled):
            wait_until(
                lambda record=record: view(connection, record.id).state == "failed",
                f"{record.id} to fail",
                timeout_s=30,
            )
            assert view(connection, record.id).error.startswith("refused, and not run: "), view(
                connection, record.id
            )
        assert worker.stop() == 0
    assert not target.exists() and not (tmp_path / ".fleet").exists()


PLANTED, PICKLED = "planted.run", b"cplanted\nrun\n."
"""Name of a function whose import writes a file, and a pickle that imports it."""
BENCH, HOP = FUNCTIONS["bench"], {"measure": "hop"}
FORMS: dict[str, dict[str, object]] = {
    "a function": {"data": [PLANTED, None, [], {}]},
    "a function of a library": {"data": ["subprocess.getoutput", None, ["touch written"], {}]},
    "a function of the operating system": {"data": ["os.system", None, ["touch written"], {}]},
    "a function of another function's module": {
        "data": ["fleet.jobs.bench.subprocess.getoutput", None, ["touch written"], {}]
    },
    "a builtin": {"data": ["exec", None, ["open('written', 'w')"], {}]},
    "a method of a class": {"data": ["pathlib.Path.touch", None, ["written"], {}]},
    "a method of an instance": {"data": ["format", "{0}", ["x"], {}]},
    "a kind with named arguments": {"data": [BENCH, None, [HOP], {"more": 1}]},
    "a kind with an instance": {"data": [BENCH, {"run": 1}, [HOP], {}]},
    "a function that is no text": {"data": [[BENCH], None, [HOP], {}]},
    "pickled data": {"data": PICKLED},
    "a pickled meta and result": {
        "data": [PLANTED, None, [], {}],
        "meta": PICKLED,
        "result": PICKLED,
    },
    "a call after success": {"success_callback_name": PLANTED},
    "a call after failure": {"failure_callback_name": PLANTED},
    "a call after a stop": {"stopped_callback_name": PLANTED},
    "retries": {"data": [PLANTED, None, [], {}], "retries_left": 3, "number_of_retries": 3},
    "repeats": {"data": [PLANTED, None, [], {}], "repeats_left": 3, "repeat_intervals": [0]},
    "a group": {"data": [PLANTED, None, [], {}], "group_id": "planted"},
}
"""Fields of malicious job records, which replace the ones that `submit` writes."""


def test_job_record_or_command_of_any_form_runs_no_code(
    connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "planted.py").write_text(
        "open('written', 'w')\ndef run(*arguments, **named): ...\n"
    )
    queue, limits = (
        open_queue(connection),
        {"job_timeout": 60, "result_ttl": 600, "failure_ttl": 600},
    )
    refused: dict[str, str] = {}
    for form, fields in FORMS.items():
        record = queue.enqueue(BENCH, HOP, **limits)
        for name, value in fields.items():
            connection.hset(
                record.key, name, value if isinstance(value, bytes | str) else json.dumps(value)
            )
        refused[form] = record.id
    after = queue.enqueue(
        PLANTED, depends_on=Dependency(refused["a function"], allow_failure=True), **limits
    )
    refused["a job that waited for another"] = after.id
    abandoned = queue.enqueue(BENCH, HOP, on_failure=Callback(PLANTED), **limits)
    queue.remove(abandoned.id)
    connection.zadd(queue.started_job_registry.key, {f"{abandoned.id}:1": 1})
    later = queue.enqueue_in(datetime.timedelta(0), PLANTED, **limits)
    with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}) as worker:
        for form, id in refused.items():
            wait_until(
                lambda id=id: view(connection, id).state == "failed",
                f"{form} to fail",
                timeout_s=30,
            )
            assert view(connection, id).error.startswith("refused, and not run: "), (
                form,
                view(connection, id),
            )
        wait_until(
            lambda: view(connection, abandoned.id).state == "failed",
            "the abandoned job to be given up",
        )
        (name,) = [one.name for one in Worker.all(connection=connection)]
        for command in (PLANTED, "import", "stop-job", "kill-horse"):
            assert send_command(connection, name, command, function=PLANTED, job_id=PLANTED) is None
        # Handled later, the last command would end the next job, as it is meant to.
        worker.wait_for("kill horse command ignored")
        last = submit(connection, "bench", {"measure": "hop", "hops": 20})
        wait_until(
            lambda: view(connection, last.id).state == "finished",
            "the worker to go on",
            timeout_s=60,
        )
        assert worker.stop() == 0
    assert view(connection, later.id).state == "scheduled"
    for id in (*refused.values(), later.id):
        delete(connection, id)
    assert not (tmp_path / "written").exists(), "nothing was imported or called"


def test_discarded_exception_of_a_stop_signal_still_ends_the_worker(connection: Redis) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    worker = JobWorker(
        [QUEUE], connection=connection, serializer=JSONSerializer, job_class=JobRecord
    )
    try:
        with suppress(StopRequested):
            worker.request_stop(signal.SIGTERM, None)
        with pytest.raises(StopRequested):
            worker.dequeue_job_and_maintain_ttl(60)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_stopped_job_worker_fails_its_job(
    connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    hanging = submit(connection, "bench", {})
    with hanging_job(tmp_path, redis_url) as (worker, family):
        assert worker.stop() == 0
    assert view(connection, hanging.id).state == "failed"
    wait_until(
        lambda: not any(process.is_running() for process in family), "the job's process to be gone"
    )


def test_running_job_is_stopped_with_its_processes(
    connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """A running job is stopped with its processes. The benchmark hangs on a server that never
    answers until it is stopped.
    """
    hanging = submit(connection, "bench", {})
    waiting = submit(connection, "bench", {"measure": "hop", "hops": 20})
    with hanging_job(tmp_path, redis_url) as (worker, family):
        assert any("bench" in command_line(process) for process in family), (
            "the benchmark is a process of its own"
        )
        with pytest.raises(Conflict, match="runs; stop it first"):
            delete(connection, hanging.id)
        stop(connection, hanging.id)
        wait_until(
            lambda: view(connection, hanging.id).state == "stopped",
            "the job to be stopped",
            timeout_s=30,
        )
        wait_until(
            lambda: not any(process.is_running() for process in family),
            "all of its processes to be gone",
        )
        wait_until(
            lambda: view(connection, waiting.id).state == "finished",
            "the next job to run",
            timeout_s=60,
        )
        with pytest.raises(Conflict, match="ended already: stopped"):
            stop(connection, hanging.id)
        delete(connection, hanging.id)
        assert [one.id for one in jobs(connection)] == [waiting.id]
        assert worker.stop() == 0


@pytest.mark.parametrize("with_child", [False, True], ids=["worker", "worker and its child"])
def test_job_of_a_killed_worker_ends_with_it_and_is_failed_by_the_next_one(
    connection: Redis, redis_url: str, tmp_path: Path, with_child: bool
) -> None:
    """The job of a killed job worker ends with it, and the next job worker marks it as failed. The
    benchmark's own Redis and producer must end too.
    """
    lost = submit(connection, "bench", {"measure": "hop", "hops": 100_000})
    waiting = submit(connection, "bench", {"measure": "hop", "hops": 20})
    with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}) as worker:
        root = psutil.Process(worker.process.pid)
        wait_until(
            lambda: len(root.children(recursive=True)) >= 4,
            "the benchmark to start its processes",
            timeout_s=60,
        )
        family = root.children(recursive=True)
        killed = [root, *root.children()] if with_child else [root]
        try:
            for process in killed:
                process.kill()
            wait_until(
                lambda: not any(map(command_line, family)), "all processes of the job to be gone"
            )
        finally:
            for process in filter(command_line, family):
                process.kill()
    assert view(connection, lost.id).state == "started"
    with start_cli("jobs", cwd=tmp_path, env={"REDIS_URL": redis_url}) as worker:
        wait_until(lambda: view(connection, lost.id).state == "failed", "the lost job to fail")
        assert f"process {root.pid}" in view(connection, lost.id).error
        assert "/retry" in view(connection, lost.id).error
        wait_until(
            lambda: view(connection, waiting.id).state == "finished",
            "the next job to run",
            timeout_s=60,
        )
        assert worker.stop() == 0
    assert not list(tmp_path.glob(f"**/jobs/{lost.id}/tmp"))


def view(connection: Redis, job_id: str) -> Job:
    found = job(connection, job_id)
    assert found is not None
    return found
