"""A task that is to run alone closes one worker until it has run, and no other: bystanders are served meanwhile, and it runs."""

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
from fleet.worker.loop import WorkerLoop
from tests.harness import ThreadFleet, answer, assert_same, collected, fake_spec, gateway, in_step, thread_fleet
from tests.support import wait_until

STAGE = StageName("lm")
NUM_TOKENS = 20
PASSES = 4
"""How often the conductor finds the suspect unclaimed before a test goes on."""


@dataclass(slots=True, kw_only=True)
class Busy:
    """Two workers, each with an answer that nobody reads yet, and a suspect that one of them keeps."""

    fleet: ThreadFleet
    client: FleetClient
    answers: dict[WorkerLoop, tuple[RequestSpec, ClientStream]]
    suspect: tuple[RequestSpec, ClientStream]

    def keepers(self) -> list[WorkerLoop]:
        return [loop for loop in self.fleet.loops if loop.intake.reserved]

    def wait_overdue(self) -> None:
        """Until the conductor has found it unclaimed so often."""
        key, looked = (self.suspect[0].id, STAGE), set[float]()

        def seen() -> bool:
            looked.add(self.fleet.driver.granted_at.get(key, 0.0))
            return len(looked) > PASSES

        wait_until(seen, "the suspect to be overdue again and again")


async def begun(client: FleetClient, fleet: ThreadFleet, at: WorkerLoop) -> tuple[RequestSpec, ClientStream]:
    """An answer under way at that worker, which waits for its listener."""
    spec = fake_spec(fleet, num_tokens=NUM_TOKENS)
    stream = await client.requests.submit(spec, None)
    await asyncio.to_thread(wait_until, lambda: spec.id in at.tasks, "it to run there")
    return spec, stream


@asynccontextmanager
async def busy(url: str) -> AsyncGenerator[Busy]:
    with thread_fleet(url, "lease.claim_timeout_s=0.3", *in_step(get_graph("text")), without=STAGE) as fleet:
        async with gateway(fleet) as client:
            first = fleet.add_worker(STAGE)
            suspect = await begun(client, fleet, first)
            answers = {first: await begun(client, fleet, first)}
            await asyncio.to_thread(drain, first)
            second = fleet.add_worker(STAGE)
            answers[second] = await begun(client, fleet, second)
            first.availability.draining = False
            found = Busy(fleet=fleet, client=client, answers=answers, suspect=suspect)
            # Two workers have died over it, as its hash has it, and nobody runs it.
            fleet.clients[0].hset(keys.task(suspect[0].id, STAGE), "deaths", 2)
            run(fleet.clients[0], scripts.redeliver(suspect[0].id, STAGE, Epoch(0)))
            await asyncio.to_thread(wait_until, found.keepers, "a worker to keep the suspect")
            yield found


def drain(loop: WorkerLoop) -> None:
    """It takes nothing from its next read on."""
    last_poll, loop.availability.draining = loop.maintenance.next_poll_s, True
    wait_until(lambda: loop.maintenance.next_poll_s != last_poll, "it to take nothing")


async def test_suspect_reserves_one_worker_and_runs_once_it_is_idle(redis_url: str) -> None:
    async with busy(redis_url) as fleet:
        (keeper,) = fleet.keepers()
        await asyncio.to_thread(fleet.wait_overdue)
        assert fleet.keepers() == [keeper], "no other is closed for it"
        expected = await answer(fleet.client, fake_spec(fleet.fleet, num_tokens=NUM_TOKENS))
        spec, stream = fleet.answers[keeper]
        assert_same(await collected(stream, spec), expected)
        spec, stream = fleet.suspect
        await asyncio.to_thread(wait_until, lambda: spec.id in keeper.tasks, "the suspect to run")
        assert list(keeper.tasks) == [spec.id] and keeper.tasks[spec.id].alone
        assert_same(await collected(stream, spec), expected)


async def test_suspect_is_claimed_by_an_idle_worker(redis_url: str) -> None:
    """Whoever kept it has work still, and takes new tasks again."""
    async with busy(redis_url) as fleet:
        (keeper,) = fleet.keepers()
        other = next(loop for loop in fleet.fleet.loops if loop is not keeper)
        await fleet.answers[other][1].abort("enough")
        spec, stream = fleet.suspect
        await asyncio.to_thread(wait_until, lambda: spec.id in other.tasks, "the suspect to run where nothing else does")
        await asyncio.to_thread(wait_until, lambda: not keeper.intake.reserved, "the other to know")
        bystander, heard = await begun(fleet.client, fleet.fleet, keeper)
        assert_same(await collected(heard, bystander), await collected(stream, spec))


async def test_aborted_suspect_reserves_no_worker(redis_url: str) -> None:
    async with busy(redis_url) as fleet:
        await fleet.suspect[1].abort("enough")
        await asyncio.to_thread(wait_until, lambda: not fleet.keepers(), "its worker to know")
