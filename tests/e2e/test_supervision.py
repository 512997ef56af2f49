"""`fleet up` as a supervisor: a dead process is logged, fenced and restarted; after the death of
`fleet up` itself no process is left.
"""

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
import redis

from fleet.cli.supervise import fence_process
from fleet.control import keys, scripts
from fleet.control.connect import connect, pairs, run, text
from fleet.control.telemetry.logs import line_of
from fleet.core.ids import RequestId, WorkerId, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.telemetry.views import LogLine
from tests.e2e.fleets import FAKE, START_S, ProcessFleet, fleet_up, owner_of, process_of, worker_ids
from tests.support import set_options, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

ROLE = GRAPHS[DEFAULT_GRAPH].stages[0].name
SETTINGS = (*FAKE, "lease.worker_ttl_s=3600")
"""Settings with a lease that outlasts the tests, so that work resumes only because a death was
detected.
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path, *SETTINGS) as fleet:
        yield fleet


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of a Redis without a fleet."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def dead_pid() -> int:
    """The pid of a process that has ended."""
    with psutil.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait(timeout=20)
    return dead.pid


def worker_of(control: redis.Redis, role: str, *, other_than: str = "") -> WorkerId:
    """Return the id of the role's only worker, once it differs from `other_than`."""

    def found() -> list[WorkerId]:
        return [
            worker
            for worker in worker_ids(control)
            if worker.startswith(f"{role}@") and worker != other_than
        ]

    (worker,) = wait_until(found, f"a worker of {role}", timeout_s=START_S)
    return worker


def is_alive(process: psutil.Process) -> bool:
    """Return True if a process is running, and not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_dead_worker_is_fenced_and_restarted_with_growing_pauses(
    fleet: ProcessFleet, control: redis.Redis
) -> None:
    first = worker_of(control, ROLE)
    process_of(first).kill()
    wait_until(
        lambda: control.zscore(keys.WORKERS, first) is None,
        "the dead worker to be fenced",
        timeout_s=20,
    )
    second = worker_of(control, ROLE, other_than=first)

    good = fleet.resolved.read_text()
    fleet.resolved.write_text("graph: [")
    process_of(second).kill()
    wait_until(
        lambda: len(failures(fleet)) >= 3, "three failed starts to be logged", timeout_s=START_S
    )
    fleet.resolved.write_text(good)
    third = worker_of(control, ROLE, other_than=second)
    assert is_alive(process_of(third)) and control.zscore(keys.WORKERS, second) is None

    failed = failures(fleet)
    pauses = [float(pause) for pause, _ in failed]
    assert pauses == sorted(set(pauses)), "each pause is longer than the one before"
    assert all("not valid YAML" in last for _, last in failed), fleet.running.output()
    assert len(re.findall(rf"\| {ROLE}\.1 started", fleet.running.output())) <= len(failed) + 3, (
        "each restart follows a death"
    )
    assert fleet.running.stop(timeout_s=30) == 0


def failures(fleet: ProcessFleet) -> list[tuple[str, str]]:
    """Return (pause in seconds, first of the worker's last lines) for each report of a worker that
    ended with status 1.
    """
    pattern = (
        rf"worker {ROLE} ended with status 1; restarting it in ([0-9.]+) s; its last "
        r"lines:\n.*?\|   (.*)\n"
    )
    return re.findall(pattern, fleet.running.output())


def test_kept_worker_without_fleet_up_is_fenced(
    client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    options = (*set_options(*SETTINGS), "--keep")
    with start_cli("worker", ROLE, *options, cwd=tmp_path, env={"REDIS_URL": redis_url}) as running:
        first = worker_of(client, ROLE)
        running.wait_for(f"worker {first} is ready")
        request = give_request_to(client, first)
        process_of(first).kill()
        running.wait_for(
            f"worker {ROLE} was killed by SIGKILL; restarting it in 0.1 s; its last lines:\n  "
            f".*{first} is ready\n"
        )
        worker_of(client, ROLE, other_than=first)
        assert client.zscore(keys.WORKERS, first) is None, (
            "the next one starts only after the fencing"
        )
        (death,) = [line for line in log_lines(client) if line.level in ("warning", "error")]
        assert (death.worker, death.request, death.stage, death.process) == (
            first,
            request,
            ROLE,
            "worker",
        )
        assert death.message == f"worker {first} died (SIGKILL); it held {request} ({ROLE})"
        assert running.stop() == 0


def give_request_to(client: redis.Redis, worker: WorkerId) -> RequestId:
    """Submit a request whose client reads nothing, and wait until the worker owns its first stage's
    task.
    """
    graph, gateway = GRAPHS[DEFAULT_GRAPH], WorkerId("gateway@test:1:a")
    sampling = {stage.name: Sampling(max_tokens=1000, seed=1) for stage in graph.stages}
    spec = RequestSpec(
        id=new_request_id(),
        graph=graph.name,
        prompt_ids=(1, 2, 3),
        outputs=tuple(graph.media),
        sampling=sampling,
    )
    stages, edges = [stage.name for stage in graph.stages], [edge.name for edge in graph.edges]
    run(client, scripts.register(gateway, "", 60_000_000, {"kind": "test"}))
    run(client, scripts.submit(spec, None, bound=8, stages=stages, edges=edges, gateway=gateway))
    wait_until(
        lambda: owner_of(client, spec.id, stages[0])[0] == worker, "the worker to own the request"
    )
    return spec.id


def log_lines(client: redis.Redis) -> list[LogLine]:
    """Return the fleet's log, oldest line first."""
    entries = cast("list[tuple[bytes, object]]", client.xrange(keys.LOGS))
    return [line_of(text(entry), pairs(raw)) for entry, raw in entries]


def test_death_of_an_unregistered_process_is_logged(
    client: redis.Redis, redis_url: str, dead_pid: int
) -> None:
    """Deaths of processes that are not registered are logged: a conductor that led, one that did
    not, and a worker that died while it was loading.
    """
    leader = WorkerId(f"conductor@{socket.gethostname()}:{dead_pid}:a")
    run(client, scripts.lead(leader, "", 60_000))
    assert fence_process(redis_url, dead_pid, "conductor", "SIGKILL")
    wait_until(
        lambda: run(client, scripts.lead(WorkerId("conductor@other"), "", 60_000)),
        "the lead to be free",
    )
    for process, role in (("conductor", ""), ("worker", f"{ROLE}.decode")):
        assert not fence_process(redis_url, dead_pid, process, "SIGKILL", role)
    led, stood_by, loading = log_lines(client)
    assert (led.level, led.process, led.worker) == (
        "warning",
        "conductor",
        leader,
    ) and f"{leader} died (SIGKILL)" in led.message
    assert (
        "`fleet conductor`, died (SIGKILL); it was not the leader" in stood_by.message
        and stood_by.process == "conductor"
    )
    assert (loading.level, loading.process, loading.stage) == ("warning", "worker", ROLE)
    assert (
        f"process {dead_pid} of" in loading.message
        and f"`fleet worker {ROLE}.decode`, died" in loading.message
    )


@pytest.mark.parametrize(
    ("lapsed", "words"), [(True, "fenced when its lease lapsed"), (False, "which had left")]
)
def test_death_seen_after_the_fencing_is_one_line_that_names_the_worker(
    client: redis.Redis, redis_url: str, dead_pid: int, lapsed: bool, words: str
) -> None:
    worker = WorkerId(f"{ROLE}@{socket.gethostname()}:{dead_pid}:a")
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    run(client, scripts.register(worker, ROLE, 60_000_000, {"kind": "worker"}))
    client.zadd(keys.WORKERS, {worker: 1})
    run(client, scripts.fence_worker(leader if lapsed else "", worker, deadline_us=1))
    assert [fence_process(redis_url, dead_pid, "worker", "SIGKILL", ROLE) for _ in range(2)] == [
        True,
        False,
    ]
    _, death = log_lines(client)
    assert (death.level, death.worker, death.stage) == ("warning", worker, ROLE)
    assert death.message == f"worker {worker}, {words}, died (SIGKILL)"


def test_only_registrations_of_the_dead_process_are_fenced(
    client: redis.Redis, redis_url: str, dead_pid: int
) -> None:
    here, alive = socket.gethostname(), os.getpid()
    own = WorkerId(f"{ROLE}@{here}:{dead_pid}:a")
    others = [
        (f"{ROLE}@elsewhere:{dead_pid}:b", "elsewhere", dead_pid),
        (f"{ROLE}@{here}:{alive}:c", here, alive),
    ]
    for worker, host, pid in [(own, here, dead_pid), *others]:
        run(
            client,
            scripts.register(
                WorkerId(worker),
                ROLE,
                60_000_000,
                {"kind": "worker", "host": host, "pid": str(pid)},
            ),
        )
    assert [
        fence_process(redis_url, pid, "worker", "SIGKILL") for pid in (dead_pid, alive, dead_pid)
    ] == [True, False, False]
    assert worker_ids(client) == {worker for worker, _, _ in others}


def test_killed_fleet_up_leaves_no_process_even_with_a_frozen_worker(
    fleet: ProcessFleet, control: redis.Redis
) -> None:
    first = worker_of(control, ROLE)
    keeper = process_of(first).parent()
    assert keeper is not None and keeper.ppid() == fleet.running.process.pid
    keeper.kill()
    fleet.running.wait_for(
        rf"the keeper of {ROLE}\.1 was lost \(killed by SIGKILL\); starting both again"
    )
    second = worker_of(control, ROLE, other_than=first)
    wait_until(
        lambda: control.zscore(keys.WORKERS, first) is None,
        "the lost worker to be fenced",
        timeout_s=20,
    )

    family = fleet.family()
    assert process_of(second) in family and len(family) >= 2 * (
        len(GRAPHS[DEFAULT_GRAPH].stages) + 4
    )
    process_of(second).suspend()
    fleet.running.process.kill()
    wait_until(
        lambda: not [process for process in family if is_alive(process)],
        "every process to be gone",
        timeout_s=40,
    )
