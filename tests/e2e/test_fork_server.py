"""Workers of a torch fleet that are forked from one server process: killed, restarted and serving,
even after that server process is killed.
"""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import redis

from fleet.control import keys
from fleet.control.connect import connect
from fleet.core.ids import WorkerId
from tests.e2e.fleets import PATIENCE_S, ProcessFleet, fleet_up, process_of, worker_ids
from tests.e2e.test_supervision import worker_of
from tests.support import set_options, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

SETTINGS = ("device=cpu", "numerics=invariant", "web.port=0")
ROLES = ("thinker", "talker", "code2wav")
MODULE = "fleet.cli.fork_server"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path, *SETTINGS) as fleet:
        yield fleet


def server_of(worker: WorkerId) -> psutil.Process:
    """Return the fork-server process that the worker was forked from."""
    server = process_of(worker).parent()
    assert server is not None and MODULE in server.cmdline()
    return server


def kill(control: redis.Redis, role: str) -> WorkerId:
    """Kill the worker of a role; return the next worker of the role once it is registered."""
    killed = worker_of(control, role)
    process_of(killed).kill()
    return worker_of(control, role, other_than=killed)


def publishes_its_memory(control: redis.Redis, role: str) -> bool:
    """Return True if the record of the role's worker has the memory of the worker's own process, to
    a tenth.
    """
    worker = worker_of(control, role)
    published = int(cast("bytes | None", control.hget(keys.worker(worker), "memory_bytes")) or 0)
    own = process_of(worker).memory_info().rss
    return abs(published - own) < own / 10


def answer_of(fleet: ProcessFleet) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    body = {
        "model": fleet.get("/v1/models")["data"][0]["id"],
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0,
    }
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ).raise_for_status()
    return answer.json()["choices"]


def test_killed_workers_are_forked_again_and_give_the_same_answer(
    fleet: ProcessFleet, control: redis.Redis
) -> None:
    expected, servers = (
        answer_of(fleet),
        {server_of(worker_of(control, role)).pid for role in ROLES},
    )
    assert len(servers) == 1, "one server forks the workers of all keepers"
    for role in ROLES:
        assert server_of(kill(control, role)).pid in servers
    assert answer_of(fleet) == expected

    (server,) = (psutil.Process(pid) for pid in servers)
    workers = worker_ids(control)
    for role in ROLES:
        wait_until(partial(publishes_its_memory, control, role), f"the memory of {role}")
    server.kill()
    server_of_killed = server_of(kill(control, ROLES[0]))
    assert server_of_killed != server and len(workers & worker_ids(control)) == len(workers) - 1
    assert answer_of(fleet) == expected
    assert "not by the fork server" not in fleet.running.output()
    assert fleet.running.stop(timeout_s=30) == 0
    wait_until(lambda: not server_of_killed.is_running(), "the server to end with the last keeper")


def test_worker_and_fork_server_end_with_a_killed_keeper(redis_url: str, tmp_path: Path) -> None:
    options = (*set_options(*SETTINGS), "--keep")
    with (
        connect(redis_url) as control,
        start_cli("worker", ROLES[2], *options, cwd=tmp_path, env={"REDIS_URL": redis_url}) as kept,
    ):
        worker = process_of(worker_of(control, ROLES[2]))
        server = worker.parent()
        assert server is not None and MODULE in server.cmdline()
        kept.stop(signal.SIGKILL)
        wait_until(
            lambda: not worker.is_running() and not server.is_running(), "worker and server to end"
        )
