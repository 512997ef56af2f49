"""Processes of `fleet up` that hang (SIGSTOP, never continued) are ended by their keepers and
started again, without a person; a slow start and a paused host are left alone.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from fleet.control import keys
from fleet.control.dead_letters import read_letters
from fleet.core.ids import RequestId, WorkerId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.disturbances import on_chunk
from tests.e2e.fleets import FAKE, PATIENCE_S, START_S, ProcessFleet, fleet_up, process_of
from tests.e2e.test_supervision import is_alive, worker_of
from tests.harness import answer, answer_disturbed, assert_same, fake_spec_of, gateway_at, in_step
from tests.support import freeze_process, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

GRAPH = GRAPHS[DEFAULT_GRAPH]
ROLE = GRAPH.stages[1].name
LEASE_S, NUM_REQUESTS = 1.0, 8
SETTINGS = (*FAKE, f"lease.worker_ttl_s={LEASE_S}", *in_step(GRAPH))
WITNESSES = ("jobs", "conductor")
"""Commands that a test stops to learn that keepers had the time to end a hung process."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path_factory.mktemp("hung"), *SETTINGS) as fleet:
        yield fleet


def end_by_keeper(fleet: ProcessFleet, command: str) -> psutil.Process:
    """Stop the process of a command, and wait until its keeper has killed it; return it."""
    process = wait_until(lambda: fleet.commands().get(command), f"{command} to run", START_S)
    assert process is not None
    freeze_process(process.pid)
    wait_until(lambda: not is_alive(process), f"{command} to be ended", PATIENCE_S)
    return process


def wait_for_another(fleet: ProcessFleet, command: str, former: psutil.Process) -> None:
    def another() -> bool:
        found = fleet.commands().get(command)
        return found is not None and found != former

    wait_until(another, f"another process of {command}", START_S)


def wait_until_served(fleet: ProcessFleet) -> None:
    """Wait until the gateway serves requests, and its console a page."""

    def serves() -> bool:
        try:
            pages = [httpx.get(fleet.url + path, timeout=5) for path in ("/ready", "/")]
        except httpx.HTTPError:
            return False
        return all(page.status_code == 200 for page in pages)

    wait_until(serves, "gateway and console to answer", START_S)


async def answers(
    fleet: ProcessFleet, disturb: Callable[[RequestId], None] = lambda _: None
) -> list[object]:
    """Receive `NUM_REQUESTS` answers at a time; call `disturb` in the middle of the first one."""
    async with gateway_at(fleet.redis_url, fleet.config) as client:
        specs = [fake_spec_of(fleet.config, seed=seed) for seed in range(NUM_REQUESTS)]
        after_chunk = on_chunk(GRAPH.edges[0].name, 8, lambda: disturb(specs[0].id))
        return [
            *await asyncio.gather(
                answer_disturbed(client, specs[0], None, after_chunk),
                *(answer(client, spec) for spec in specs[1:]),
            )
        ]


def assert_all_same(got: Sequence[object], expected: Sequence[object]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)  # pyright: ignore[reportArgumentType]


async def test_requests_of_a_stopped_only_worker_end_correctly_and_its_role_is_back(
    fleet: ProcessFleet, control: redis.Redis
) -> None:
    expected = await answers(fleet)
    first = worker_of(control, ROLE)
    process = process_of(first)

    def stop(_request: RequestId) -> None:
        wait_until(lambda: control.scard(keys.LIVE) == NUM_REQUESTS, "every request to be live")
        freeze_process(process.pid)

    assert_all_same(await answers(fleet, stop), expected)
    assert not is_alive(process) and not read_letters(control)
    assert is_alive(process_of(worker_of(control, ROLE, other_than=first)))
    fleet.running.wait_for(rf"worker {ROLE} hangs: it has been stopped for [0-9.]+ s; it is killed")


@pytest.mark.parametrize("command", ["conductor", "web", "redis", "jobs"])
async def test_stopped_process_is_ended_and_started_again(
    fleet: ProcessFleet, command: str
) -> None:
    former = end_by_keeper(fleet, command)
    wait_for_another(fleet, command, former)
    wait_until_served(fleet)
    assert len(await answers(fleet)) == NUM_REQUESTS
    fleet.running.wait_for(rf"{command} hangs: it has been stopped for ")


def test_stopped_process_kept_without_fleet_up_is_ended(
    fleet: ProcessFleet, control: redis.Redis
) -> None:
    """A stopped process that `--keep` keeps, as in a Procfile, is ended and started again: a second
    worker of a role, which leaves at the end.
    """
    own = worker_of(control, ROLE)
    with start_cli("worker", ROLE, "--keep", cwd=fleet.folder, env=fleet.env) as kept:
        first = WorkerId(kept.wait_for(rf"worker ({ROLE}@\S+) is ready", timeout_s=START_S)[1])
        process = process_of(first)
        freeze_process(process.pid)
        wait_until(lambda: not is_alive(process), "the kept worker to be ended", PATIENCE_S)
        kept.wait_for(rf"is ready\n(?:.*\n)+.*worker {ROLE}@\S+ is ready", timeout_s=START_S)
        assert is_alive(process_of(own))
        assert kept.stop() == 0


def test_slow_start_is_left_alone(fleet: ProcessFleet, control: redis.Redis) -> None:
    """A slow start is left alone: a worker that waits for its configuration outlives two other
    processes that are stopped one after the other, each of which is ended meanwhile.
    """
    good, aside = fleet.resolved, fleet.folder / "aside.yaml"
    first, name = worker_of(control, ROLE), f"worker {ROLE}"
    former = process_of(first)
    good.rename(aside)
    os.mkfifo(good)
    try:
        former.kill()
        wait_for_another(fleet, name, former)
        starting = fleet.commands()[name]
        for command in WITNESSES:
            end_by_keeper(fleet, command)
        assert is_alive(starting) and fleet.commands()[name] == starting
    finally:
        aside.rename(good)
        for command in (name, *WITNESSES):
            if (waiting := fleet.commands().get(command)) is not None:
                waiting.kill()
    worker_of(control, ROLE, other_than=first)
    wait_until_served(fleet)


@pytest.mark.parametrize("keepers_first", [True, False])
async def test_paused_host_loses_no_process(fleet: ProcessFleet, *, keepers_first: bool) -> None:
    """A host that is paused for longer than two leases loses no process: its keepers stand still
    together with the processes that they watch.
    """
    wait_until_served(fleet)
    before, num_hangs = fleet.commands(), fleet.running.output().count(" hangs: ")
    family = fleet.family() if keepers_first else fleet.family()[::-1]
    paused_until_s = time.monotonic() + 5 * LEASE_S
    for process in family:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: time.monotonic() > paused_until_s, "two leases to pass")
    finally:
        for process in family:
            os.kill(process.pid, signal.SIGCONT)
    wait_until_served(fleet)
    assert len(await answers(fleet)) == NUM_REQUESTS
    end_by_keeper(fleet, "jobs")
    after = fleet.commands()
    assert {name for name in before if after.get(name) != before[name]} <= {"jobs"}
    assert fleet.running.output().count(" hangs: ") <= num_hangs + 1


def test_stopped_process_is_left_alone_where_the_configuration_says_so(tmp_path: Path) -> None:
    """A stopped process is left alone where the configuration says so: it continues as the same
    process after longer than two leases.
    """
    with fleet_up(tmp_path, *SETTINGS, "lease.end_hung_processes=false") as fleet:
        process = fleet.commands()["conductor"]
        freeze_process(process.pid)
        stopped_until_s = time.monotonic() + 4 * LEASE_S
        wait_until(lambda: time.monotonic() > stopped_until_s, "two leases to pass")
        assert fleet.commands()["conductor"] == process
        process.resume()
        wait_until_served(fleet)
        assert " hangs: " not in fleet.running.output()
