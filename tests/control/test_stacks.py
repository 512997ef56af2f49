"""Stacks of a worker's threads are logged on request and when its loop hangs, by another thread
than the hanging one.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import run
from fleet.control.log_stream import shipping
from fleet.core.log_labels import Labels
from fleet.worker.process import lease as leases
from fleet.worker.process.lease import Lease
from fleet.worker.process.stacks import stacks
from tests.control_plane import WORKER, Control
from tests.support import stream_entries, wait_until

BLOCKED_FUNCTION = "blocked_function"


def test_dump_order_is_answered_once_by_a_renewal(control: Control) -> None:
    renew = scripts.renew(WORKER, 60_000_000, {"running": 0})
    assert control.run(renew) == "ok"
    assert [control.order("dump") for _ in range(2)] == ["ok", "ok"]
    assert [control.run(renew), control.run(renew)] == ["dump", "ok"]
    control.order("stop")
    assert control.order("dump") == "ok", "a leaving worker can be dumped too"
    assert control.client.hget(keys.worker(WORKER), "leaving") == b"1"


@pytest.fixture
def client(client: redis.Redis) -> redis.Redis:
    """A fleet client of a Redis in which the worker is registered."""
    run(client, scripts.register(WORKER, "lm", 60_000_000, {"kind": "test"}))
    return client


def traces(client: redis.Redis) -> list[str]:
    return [
        fields[b"x"].decode() for _, fields in stream_entries(client, keys.LOGS) if b"x" in fields
    ]


@pytest.fixture
def hanging() -> Iterator[None]:
    """Start a thread that blocks in a named function."""
    release = threading.Event()

    def blocked_function() -> None:
        release.wait(60)

    thread = threading.Thread(target=blocked_function, daemon=True)
    thread.start()
    yield
    release.set()
    thread.join(timeout=10)


def test_threads_with_equal_stacks_are_logged_once() -> None:
    done, barrier = threading.Event(), threading.Barrier(9)

    def idle_thread() -> None:
        barrier.wait()
        done.wait(60)

    with ThreadPoolExecutor(8, "many") as pool:
        for _ in range(8):
            pool.submit(idle_thread)
        barrier.wait()
        place = f"in {idle_thread.__name__}"
        wait_until(lambda: stacks().count(place) == 1, "all threads to be idle")
        dump = stacks()
        done.set()
    assert all(f"many_{number}" in dump for number in range(8))
    assert dump.rindex("MainThread") > dump.rindex(place)


def test_dumped_stacks_are_in_the_fleet_log(
    client: redis.Redis, redis_url: str, hanging: None
) -> None:
    lease = Lease(client, WORKER, 0.3, dict)
    with shipping(redis_url, Labels("worker", WORKER)):
        lease.start()
        run(client, scripts.order(WORKER, "dump"))
        found = wait_until(lambda: traces(client), "the stacks to be logged")
        lease.stop()
    assert found is not None and BLOCKED_FUNCTION in found[0] and "MainThread" in found[0]
    assert not lease.lost.is_set()


def test_hanging_loop_is_logged_once(
    client: redis.Redis,
    redis_url: str,
    hanging: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(leases, "STUCK_S", 0.2)
    lease = Lease(client, WORKER, 0.1, dict)
    lease.progress()
    with shipping(redis_url, Labels("worker", WORKER)), caplog.at_level(logging.WARNING):
        lease.start()
        found = wait_until(lambda: traces(client), "the stacks to be logged")
        lease.progress()
        deadline = client.zscore(keys.WORKERS, WORKER)
        wait_until(
            lambda: client.zscore(keys.WORKERS, WORKER) != deadline, "the lease to be renewed again"
        )
        wait_until(lambda: len(traces(client)) == 2, "the stacks to be logged again")
        lease.stop()
    assert found is not None and len(found) == 1 and BLOCKED_FUNCTION in found[0]
