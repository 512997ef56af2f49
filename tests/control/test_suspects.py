"""Suspects: a task that must run alone is reserved by one worker until it has run; other requests
are served meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import redis
from msgspec.structs import replace

from fleet.config.placement import for_role
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run
from fleet.control.stream import ClientStream
from fleet.core.errors import FleetError
from fleet.core.events import TaskLost
from fleet.core.ids import Epoch, RequestId, WorkerId
from fleet.core.request import RequestSpec
from fleet.engine.fake import FakeEngine
from fleet.graphs import get_graph
from fleet.stages.base import BuiltStage
from fleet.worker.loop.loop import WorkerLoop
from fleet.worker.main import build_stage
from tests.control_plane import OTHER, REQUEST, ROLE, STAGE, WORKER, Control
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

pytestmark = pytest.mark.one_file_in(3, "control in a process")


def reserve(control: Control, worker: WorkerId = WORKER, epoch: Epoch | None = None) -> str:
    entry = control.task()["entry"]
    return control.run(
        scripts.reserve(worker, ROLE, entry, REQUEST, STAGE, epoch or control.epoch())
    )


def reserved_tasks(control: Control, worker: WorkerId = WORKER) -> set[bytes]:
    return cast("set[bytes]", control.client.smembers(keys.worker_tasks(worker)))


@pytest.fixture
def granted(control: Control) -> Control:
    """A control plane with a task granted to run alone, and two workers of its role."""
    control.register(OTHER)
    control.grant_alone()
    return control


def test_reservation_ends_with_its_grant(granted: Control) -> None:
    old = granted.epoch()
    assert reserve(granted) == "ok"
    granted.grant_alone()
    assert reserve(granted, epoch=old) == "stale" and reserved_tasks(granted) == set()
    assert reserve(granted, OTHER) == "ok"
    granted.abort()
    assert reserve(granted, OTHER) == "ended" and reserved_tasks(granted, OTHER) == set()


def test_gone_or_draining_worker_cannot_reserve_and_loses_reservations_without_a_death(
    granted: Control,
) -> None:
    assert reserve(granted, WorkerId("lm@test:3:c")) == "unlisted"
    assert reserve(granted) == "ok"
    granted.kill()
    granted.grant_alone()
    assert reserve(granted, OTHER) == "ok"
    assert granted.order("drain", OTHER) == "ok"
    granted.grant_alone()
    assert reserve(granted, OTHER) == "draining"
    assert [(event.deaths, event.alone) for event in granted.events_of(TaskLost)] == [
        (0, False)
    ] * 2


@pytest.mark.parametrize("control", ["redis"], indirect=True)
def test_overdue_reservation_is_granted_again_only_to_an_idle_worker(
    granted: Control, client: redis.Redis
) -> None:
    assert reserve(granted) == "ok"
    reserved = granted.epoch()
    client.sadd(keys.worker_tasks(OTHER), "req-2|lm")
    assert granted.watch() == "ok" and granted.epoch() == reserved
    client.delete(keys.worker_tasks(OTHER))
    assert granted.order("drain", OTHER) == "ok"
    assert granted.watch() == "ok" and granted.epoch() == reserved, "the other worker is draining"
    assert granted.order("resume", OTHER) == "ok"
    assert granted.watch() == "ok" and granted.epoch() > reserved, "the other worker is idle"


NUM_OVERDUE = 4
"""Number of times that the conductor finds the suspect unclaimed before a test continues."""


@dataclass(slots=True, kw_only=True)
class BusyFleet:
    """Two workers, each busy with an answer that is not read, and a suspect that one of the workers
    has reserved.
    """

    fleet: ThreadFleet
    client: FleetClient
    answers: dict[WorkerLoop, tuple[RequestSpec, ClientStream]]
    suspect: tuple[RequestSpec, ClientStream]

    def reserving_workers(self) -> list[WorkerLoop]:
        """Return the workers that hold a reservation, as Redis confirms for the suspect: a worker
        also holds one that it is about to ask for.
        """
        task = keys.task(self.suspect[0].id, STAGE)
        confirmed = self.fleet.clients[0].hget(task, "reserved_for")
        return [
            loop
            for loop in self.fleet.loops
            if loop.intake.reserved and confirmed == loop.worker.encode()
        ]

    def wait_overdue(self) -> None:
        """Wait until the conductor has found the suspect unclaimed `NUM_OVERDUE` times."""
        pair, looks = f"{self.suspect[0].id}|{STAGE}", set[object]()

        def seen() -> bool:
            looks.add(self.fleet.clients[0].zscore(keys.GRANTED, pair))
            return len(looks) > NUM_OVERDUE

        wait_until(seen, "the suspect to be overdue several times")


async def begin_answer(
    client: FleetClient, fleet: ThreadFleet, at: WorkerLoop
) -> tuple[RequestSpec, ClientStream]:
    """Submit a request, and wait until it runs at the worker `at`, where it pauses for its
    client.
    """
    spec = fake_spec(fleet)
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
        expected = await answer(fleet.client, fake_spec(fleet.fleet))
        spec, stream = fleet.answers[reserving_worker]
        assert_same(await collected(stream, spec), expected)
        spec, stream = fleet.suspect
        await asyncio.to_thread(
            wait_until, lambda: spec.id in reserving_worker.tasks, "the suspect to run"
        )
        assert list(reserving_worker.tasks) == [spec.id] and reserving_worker.tasks[spec.id].alone
        assert_same(await collected(stream, spec), expected)


async def test_suspect_is_claimed_by_an_idle_worker(redis_url: str) -> None:
    """A suspect is claimed by an idle worker. The worker that had reserved it still has work, and
    claims new tasks again.
    """
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
            wait_until,
            lambda: not any(loop.intake.reserved for loop in fleet.fleet.loops),
            "the reservation to be dropped",
        )


class SuspectingPasses:
    """Remote steps of a fake engine. `suspects`: function that is called once, in the loop's thread
    before the loop reports the suspects that it returns.
    """

    def __init__(self) -> None:
        self.suspects: Callable[[], Sequence[RequestId]] | None = None

    def accepts_requests(self) -> bool:
        return True

    def outage(self) -> FleetError | None:
        return None

    def take_suspects(self) -> Sequence[RequestId]:
        suspects, self.suspects = self.suspects, None
        return suspects() if suspects is not None else ()


async def test_grant_that_arrives_with_the_report_of_a_suspect_is_claimed(redis_url: str) -> None:
    """A grant that is in the worker's inbox when the worker reports a suspect is claimed at once:
    the next turn of a conversation must not wait until its grant is overdue.
    """
    settings = (
        "lease.claim_timeout_s=3600",
        "lease.no_worker_timeout_s=3600",
        "stages.lm.max_batch=2",
        *in_step(get_graph("text")),
    )
    async with open_fleet(redis_url, *settings, without=STAGE) as (fleet, client):
        engine, remote = FakeEngine(max_batch=2, source=True), SuspectingPasses()
        engine.remote = remote
        whole = build_stage(for_role(fleet.config, fleet.config.role(STAGE)), STAGE, Path())
        worker = fleet.add_worker(STAGE, BuiltStage(engine=engine, adapter=whole.adapter))
        first, _ = await begin_answer(client, fleet, worker)
        run(fleet.clients[0], scripts.adopt_prefix(worker.worker, STAGE, "talk", keep_s=60))
        turn = replace(fake_spec(fleet), session="talk")
        event_loop = asyncio.get_running_loop()
        streams: list[ClientStream] = []

        def submit_turn() -> Sequence[RequestId]:
            submitting = asyncio.run_coroutine_threadsafe(
                client.requests.submit(turn, None), event_loop
            )
            streams.append(submitting.result(timeout=10))
            return [first.id]

        remote.suspects = submit_turn
        await asyncio.to_thread(
            wait_until, lambda: turn.id in worker.tasks, "the turn to be claimed", 10
        )
        assert await collected(streams[0], turn)
