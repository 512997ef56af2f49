"""Survivors of the deaths of their peers: what they keep open, and a worker whose NIXL agent a
dying peer has left beyond repair.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
import redis

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.ids import WorkerId
from tests.contract.incomplete_entries import receive_queues
from tests.e2e.dying_peers import PREFILL, SETTINGS, OpenResources, Survivors, survivors
from tests.e2e.fleets import PATIENCE_S, START_S, process_of, worker_ids
from tests.support import set_options, start_cli, wait_until

pytestmark = [pytest.mark.one_file_in(10, "processes"), pytest.mark.timeout(900)]

SPARE_KIB = 16 * 1024
LASTING_S = 180.0
"""Time within which a worker leaves that is beyond repair, also on a busy machine."""


@pytest.fixture
def alive(redis_url: str, tmp_path: Path) -> Iterator[Survivors]:
    with survivors(redis_url, tmp_path) as found:
        yield found


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


def check_deaths(alive: Survivors, *pairs: int) -> None:
    """Kill `pairs` of peers, round by round; check that the last round leaves the survivors with no
    more files and threads than the first one.
    """
    first: tuple[OpenResources, OpenResources] | None = None
    for number in pairs:
        alive.kill_peers(number)
        wait_until(alive.are_settled, "the dead peers to be forgotten", PATIENCE_S)
        counted = alive.open_resources()
        print(*counted)
        first = first or counted
    assert first is not None

    def is_flat() -> bool:
        # again and again, since a worker does something at the moment of counting
        return all(
            last.files <= before.files and last.threads <= before.threads
            for before, last in zip(first, alive.open_resources(), strict=True)
        )

    wait_until(is_flat, f"no more files and threads than after {2 * pairs[0]} deaths: {first}")
    for before, last in zip(first, alive.open_resources(), strict=True):
        assert last.rss_kib <= before.rss_kib + SPARE_KIB


def test_deaths_of_peers_leave_nothing_open_in_survivors(alive: Survivors) -> None:
    """After twelve deaths the survivors have no more files and threads than after four."""
    check_deaths(alive, 2, 2, 2)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_two_hundred_deaths_of_peers_leave_nothing_open_in_survivors(alive: Survivors) -> None:
    check_deaths(alive, 2, *[4] * 24, 2)


def test_worker_with_an_agent_beyond_repair_leaves_and_is_started_again(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """A worker leaves, and its keeper starts it again, when a peer was killed within a message to
    it: its NIXL thread then uses a core without progress, and its agent can never close.
    """
    command = ("worker", PREFILL, "--keep", *set_options(*SETTINGS))
    with start_cli(*command, cwd=tmp_path, env={"REDIS_URL": redis_url}) as kept:
        first = worker_other_than(client, None)
        process = process_of(first)
        for queue in receive_queues(process.pid):
            queue.begin_entry()
        kept.wait_for("makes no progress: its thread has used", timeout_s=PATIENCE_S)
        kept.wait_for("neither progress nor can be closed", timeout_s=LASTING_S)
        second = worker_other_than(client, first)
        wait_until(lambda: not process.is_running(), "the first process to end", PATIENCE_S)
        left = cast("list[bytes | None]", client.hmget(keys.gone(first), ["how", "stalled_agents"]))
        assert [text(value) for value in left] == ["left", "1"]
        assert "ended with status 1; restarting it" in kept.output()
        assert psutil.Process(process_of(second).pid).is_running()


def worker_other_than(client: redis.Redis, former: WorkerId | None) -> WorkerId:
    """Return the only listed worker, once it differs from `former`."""

    def found() -> list[WorkerId]:
        return [worker for worker in worker_ids(client) if worker != former]

    (worker,) = wait_until(found, "a worker", START_S)
    return worker
