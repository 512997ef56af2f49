"""A task that is to run alone reserves one worker until it has run; other requests are served
meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run
from fleet.control.stream import ClientStream
from fleet.core.ids import Epoch, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from fleet.worker.loop.loop import WorkerLoop
from tests.harness import (
    ThreadFleet,
    answer,
    assert_same,
    collected,
    fake_spec,
    in_step,
    open_fleet,
    stop_claims,
)
from tests.support import wait_until

STAGE = StageName("lm")
NUM_TOKENS = 20
NUM_OVERDUE = 4
"""Number of times the conductor finds the suspect unclaimed before a test continues."""


@dataclass(slots=True, kw_only=True)
class BusyFleet:
    """Two workers, each with an unread answer, and a suspect that one of them has reserved."""

    fleet: ThreadFleet
    client: FleetClient
    answers: dict[WorkerLoop, tuple[RequestSpec, ClientStream]]
    suspect: tuple[RequestSpec, ClientStream]

    def reserving_workers(self) -> list[WorkerLoop]:
        return [loop for loop in self.fleet.loops if loop.intake.reserved]

    def wait_overdue(self) -> None:
        """Wait until the conductor has found the suspect unclaimed `NUM_OVERDUE` times."""
        key, grant_times = (self.suspect[0].id, STAGE), set[float]()

        def seen() -> bool:
            grant_times.add(self.fleet.driver.granted_at.get(key, 0.0))
            return len(grant_times) > NUM_OVERDUE

        wait_until(seen, "the suspect to be overdue several times")


async def begin_answer(
    client: FleetClient, fleet: ThreadFleet, at: WorkerLoop
) -> tuple[RequestSpec, ClientStream]:
    """Submit a request and wait until it runs at the worker, where it pauses for its client."""
    spec = fake_spec(fleet, num_tokens=NUM_TOKENS)
    stream = await client.requests.submit(spec, None)
    await asyncio.to_thread(
        wait_until, lambda: spec.id in at.tasks, "the task to run at the worker"
    )
    return spec, stream


@asynccontextmanager
async def open_busy_fleet(url: str) -> AsyncGenerator[BusyFleet]:
    async with open_fleet(
        url, "lease.claim_timeout_s=0.3", *in_step(get_graph("text")), without=STAGE
    ) as (fleet, client):
        first = fleet.add_worker(STAGE)
        suspect = await begin_answer(client, fleet, first)
        answers = {first: await begin_answer(client, fleet, first)}
        await asyncio.to_thread(stop_claims, first)
        second = fleet.add_worker(STAGE)
        answers[second] = await begin_answer(client, fleet, second)
        first.availability.draining = False
        busy_fleet = BusyFleet(fleet=fleet, client=client, answers=answers, suspect=suspect)
        # Two deaths are recorded in the task's hash, and no worker owns it.
        fleet.clients[0].hset(keys.task(suspect[0].id, STAGE), "deaths", 2)
        run(fleet.clients[0], scripts.redeliver(suspect[0].id, STAGE, Epoch(0)))
        await asyncio.to_thread(
            wait_until, busy_fleet.reserving_workers, "a worker to reserve the suspect"
        )
        yield busy_fleet


async def test_suspect_reserves_one_worker_and_runs_once_it_is_idle(redis_url: str) -> None:
    async with open_busy_fleet(redis_url) as fleet:
        (reserving_worker,) = fleet.reserving_workers()
        await asyncio.to_thread(fleet.wait_overdue)
        assert fleet.reserving_workers() == [reserving_worker], "no other worker is reserved"
        expected = await answer(fleet.client, fake_spec(fleet.fleet, num_tokens=NUM_TOKENS))
        spec, stream = fleet.answers[reserving_worker]
        assert_same(await collected(stream, spec), expected)
        spec, stream = fleet.suspect
        await asyncio.to_thread(
            wait_until, lambda: spec.id in reserving_worker.tasks, "the suspect to run"
        )
        assert list(reserving_worker.tasks) == [spec.id] and reserving_worker.tasks[spec.id].alone
        assert_same(await collected(stream, spec), expected)


async def test_suspect_is_claimed_by_an_idle_worker(redis_url: str) -> None:
    """The worker that had reserved the suspect still has work, and claims new tasks again."""
    async with open_busy_fleet(redis_url) as fleet:
        (reserving_worker,) = fleet.reserving_workers()
        other = next(loop for loop in fleet.fleet.loops if loop is not reserving_worker)
        await fleet.answers[other][1].abort("enough")
        spec, stream = fleet.suspect
        await asyncio.to_thread(
            wait_until, lambda: spec.id in other.tasks, "the suspect to run where nothing else does"
        )
        await asyncio.to_thread(
            wait_until,
            lambda: not reserving_worker.intake.reserved,
            "the reservation to be dropped",
        )
        bystander, received = await begin_answer(fleet.client, fleet.fleet, reserving_worker)
        assert_same(await collected(received, bystander), await collected(stream, spec))


async def test_aborted_suspect_reserves_no_worker(redis_url: str) -> None:
    async with open_busy_fleet(redis_url) as fleet:
        await fleet.suspect[1].abort("enough")
        await asyncio.to_thread(
            wait_until, lambda: not fleet.reserving_workers(), "the reservation to be dropped"
        )
