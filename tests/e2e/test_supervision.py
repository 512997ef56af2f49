"""`fleet up` as a supervisor: a dead process is logged, fenced and restarted; after its own death no process is left."""

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
from fleet.control.embedded import embedded_url
from fleet.control.telemetry.logs import line_of
from fleet.core.ids import Epoch, RequestId, RoleName, WorkerId, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.core.telemetry import LogLine
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import Running, start_cli, wait_until

ROLE = GRAPHS[DEFAULT_GRAPH].stages[0].name
SETTINGS = ("engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0", "lease.worker_ttl_s=3600")
"""A lease that outlasts the tests: work resumes only because a death was seen."""
START_S = 90.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Running]:
    with start_cli("up", *(word for setting in SETTINGS for word in ("--set", setting)), cwd=tmp_path) as running:
        running.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        yield running


@pytest.fixture
def control(fleet: Running, tmp_path: Path) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(embedded_url(tmp_path / ".fleet" / "redis"), decode_responses=True) as client:
        yield client


def worker_of(control: redis.Redis, role: str, *, other_than: str = "") -> str:
    """Return the id of the only worker of a role, once there is one other than `other_than`."""

    def found() -> list[str]:
        ids = cast("list[str]", control.zrange(keys.WORKERS, 0, -1))
        return [worker for worker in ids if worker.startswith(f"{role}@") and worker != other_than]

    (worker,) = wait_until(found, f"a worker of {role}", timeout_s=START_S)
    return worker


def process_of(worker: str) -> psutil.Process:
    return psutil.Process(int(worker.split(":")[1]))


def is_alive(process: psutil.Process) -> bool:
    """Return False also for a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_dead_worker_is_fenced_and_restarted_with_growing_pauses(fleet: Running, control: redis.Redis, tmp_path: Path) -> None:
    first = worker_of(control, ROLE)
    process_of(first).kill()
    wait_until(lambda: control.zscore(keys.WORKERS, first) is None, "the dead worker to be fenced", timeout_s=20)
    second = worker_of(control, ROLE, other_than=first)

    resolved = tmp_path / ".fleet" / "resolved.yaml"
    good = resolved.read_text()
    resolved.write_text("graph: [")
    process_of(second).kill()
    wait_until(lambda: len(failures(fleet)) >= 3, "three failed starts to be logged", timeout_s=START_S)
    resolved.write_text(good)
    third = worker_of(control, ROLE, other_than=second)
    assert is_alive(process_of(third)) and control.zscore(keys.WORKERS, second) is None

    failed = failures(fleet)
    pauses = [float(pause) for pause, _ in failed]
    assert pauses == sorted(set(pauses)), "each pause is longer than the one before"
    assert all("not valid YAML" in last for _, last in failed), fleet.output()
    assert len(re.findall(rf"\| {ROLE}\.1 started", fleet.output())) <= len(failed) + 3, "each restart follows a death"
    assert fleet.stop(timeout_s=30) == 0


def failures(fleet: Running) -> list[tuple[str, str]]:
    """Return (pause in seconds, first of the last lines) for each report of a worker that ended with status 1."""
    pattern = rf"worker {ROLE} ended with status 1; restarting it in ([0-9.]+) s; its last lines:\n.*?\|   (.*)\n"
    return re.findall(pattern, fleet.output())


def test_kept_worker_without_fleet_up_is_fenced(redis_url: str, tmp_path: Path) -> None:
    options = [word for setting in SETTINGS[:3] + SETTINGS[-1:] for word in ("--set", setting)]
    with (
        redis.Redis.from_url(redis_url, decode_responses=True) as control,
        start_cli("worker", ROLE, *options, "--keep", cwd=tmp_path, env={"REDIS_URL": redis_url}) as kept,
    ):
        first = worker_of(control, ROLE)
        kept.wait_for(f"worker {first} is ready")
        request = give_request_to(redis_url, first)
        process_of(first).kill()
        kept.wait_for(f"worker {ROLE} was killed by SIGKILL; restarting it in 0.1 s; its last lines:\n  .*{first} is ready\n")
        worker_of(control, ROLE, other_than=first)
        assert control.zscore(keys.WORKERS, first) is None, "the next one starts only after the fencing"
        (death,) = [line for line in log_lines(redis_url) if line.level in ("warning", "error")]
        assert (death.worker, death.request, death.stage, death.process) == (first, request, ROLE, "worker")
        assert death.message == f"worker {first} died (SIGKILL); it held {request} ({ROLE})"
        assert kept.stop() == 0


def give_request_to(redis_url: str, worker: str) -> RequestId:
    """Submit a request whose client reads nothing, grant its first stage, and wait until the worker owns it."""
    graph, gateway = GRAPHS[DEFAULT_GRAPH], WorkerId("gateway@test:1:a")
    sampling = {stage.name: Sampling(max_tokens=1000, seed=1) for stage in graph.stages}
    spec = RequestSpec(id=new_request_id(), graph=graph.name, prompt_ids=(1, 2, 3), outputs=tuple(graph.media), sampling=sampling)
    stages, edges = [stage.name for stage in graph.stages], [edge.name for edge in graph.edges]
    client = connect(redis_url)
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    run(client, scripts.register(gateway, "", 60_000_000, {"kind": "test"}))
    run(client, scripts.submit(spec, None, bound=8, stages=stages, edges=edges, gateway=gateway))
    run(client, scripts.grant(leader, spec.id, stages[0], RoleName(ROLE), Epoch(0)))
    wait_until(lambda: text(client.hget(keys.task(spec.id, stages[0]), "owner")) == worker, "the worker to own the request")
    client.close()
    return spec.id


def log_lines(redis_url: str) -> list[LogLine]:
    """Return the fleet's log, oldest line first."""
    client = connect(redis_url)
    entries = cast("list[tuple[bytes, object]]", client.xrange(keys.LOGS))
    client.close()
    return [line_of(text(entry), pairs(raw)) for entry, raw in entries]


def test_death_of_an_unregistered_process_is_logged(redis_url: str) -> None:
    """A conductor that led, one that did not, and a worker that died while it was loading."""
    with psutil.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait(timeout=20)
    client, leader = connect(redis_url), WorkerId(f"conductor@{socket.gethostname()}:{dead.pid}:a")
    run(client, scripts.lead(leader, "", 60_000))
    assert fence_process(redis_url, dead.pid, "conductor", "SIGKILL")
    wait_until(lambda: run(client, scripts.lead(WorkerId("conductor@other"), "", 60_000)), "the lead to be free")
    client.close()
    for process, role in (("conductor", ""), ("worker", f"{ROLE}.decode")):
        assert not fence_process(redis_url, dead.pid, process, "SIGKILL", role)
    led, stood_by, loading = log_lines(redis_url)
    assert (led.level, led.process, led.worker) == ("warning", "conductor", leader) and f"{leader} died (SIGKILL)" in led.message
    assert "`fleet conductor`, died (SIGKILL); it was not the leader" in stood_by.message and stood_by.process == "conductor"
    assert (loading.level, loading.process, loading.stage) == ("warning", "worker", ROLE)
    assert f"process {dead.pid} of" in loading.message and f"`fleet worker {ROLE}.decode`, died" in loading.message


@pytest.mark.parametrize(("lapsed", "words"), [(True, "fenced when its lease lapsed"), (False, "which had left")])
def test_death_seen_after_the_fencing_is_one_line_that_names_the_worker(redis_url: str, lapsed: bool, words: str) -> None:
    with psutil.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait(timeout=20)
    client, worker = connect(redis_url), WorkerId(f"{ROLE}@{socket.gethostname()}:{dead.pid}:a")
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    run(client, scripts.register(worker, ROLE, 60_000_000, {"kind": "worker"}))
    client.zadd(keys.WORKERS, {worker: 1})
    run(client, scripts.fence_worker(leader if lapsed else "", worker))
    assert [fence_process(redis_url, dead.pid, "worker", "SIGKILL", ROLE) for _ in range(2)] == [True, False]
    client.close()
    _, death = log_lines(redis_url)
    assert (death.level, death.worker, death.stage) == ("warning", worker, ROLE)
    assert death.message == f"worker {worker}, {words}, died (SIGKILL)"


def test_only_registrations_of_the_dead_process_are_fenced(redis_url: str) -> None:
    with psutil.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait(timeout=20)
    here, alive = socket.gethostname(), os.getpid()
    own = WorkerId(f"{ROLE}@{here}:{dead.pid}:a")
    others = [(f"{ROLE}@elsewhere:{dead.pid}:b", "elsewhere", dead.pid), (f"{ROLE}@{here}:{alive}:c", here, alive)]
    client = connect(redis_url)
    for worker, host, pid in [(own, here, dead.pid), *others]:
        run(client, scripts.register(WorkerId(worker), ROLE, 60_000_000, {"kind": "worker", "host": host, "pid": str(pid)}))
    assert [fence_process(redis_url, pid, "worker", "SIGKILL") for pid in (dead.pid, alive, dead.pid)] == [True, False, False]
    left = {text(worker) for worker in cast("list[bytes]", client.zrange(keys.WORKERS, 0, -1))}
    assert left == {worker for worker, _, _ in others}
    client.close()


def test_killed_fleet_up_leaves_no_process_even_with_a_frozen_worker(fleet: Running, control: redis.Redis) -> None:
    first = worker_of(control, ROLE)
    keeper = process_of(first).parent()
    assert keeper is not None and keeper.ppid() == fleet.process.pid
    keeper.kill()
    fleet.wait_for(rf"the keeper of {ROLE}\.1 was lost \(killed by SIGKILL\); starting both again")
    second = worker_of(control, ROLE, other_than=first)
    wait_until(lambda: control.zscore(keys.WORKERS, first) is None, "the lost worker to be fenced", timeout_s=20)

    family = psutil.Process(fleet.process.pid).children(recursive=True)
    assert process_of(second) in family and len(family) >= 2 * (len(GRAPHS[DEFAULT_GRAPH].stages) + 4)
    process_of(second).suspend()
    fleet.process.kill()
    wait_until(lambda: not [process for process in family if is_alive(process)], "every process to be gone", timeout_s=40)
