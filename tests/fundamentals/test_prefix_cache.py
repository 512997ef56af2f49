"""A conversation's next turn goes to the worker that keeps its prefix, if that has room, and computes only what is new.

Wherever it goes, the answer is the same.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import redis
from msgspec.structs import replace

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, run, text
from fleet.core.chunk import Chunk
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from fleet.worker.loop import WorkerLoop
from tests.harness import ThreadFleet, answer, assert_same, fake_spec, gateway, held, in_step, thread_fleet
from tests.support import await_until, wait_until

GRAPH = get_graph("text")
STAGE, ROLE, TEXT = GRAPH.stages[0].name, RoleName(GRAPH.stages[0].name), GRAPH.edges[0].name
TALK, KEEPER, OTHER, GATEWAY = "talk", WorkerId("lm@test:1:a"), WorkerId("lm@test:2:b"), WorkerId("gateway@test:1:a")
HOUR_US = 3_600_000_000
NEVER_OVERDUE = ("lease.claim_timeout_s=3600", "lease.no_worker_timeout_s=3600")


@dataclass(slots=True)
class Bench:
    """A leader, a gateway and two workers, of which one keeps the prefix of TALK since its first turn; no process."""

    client: redis.Redis
    leader: str

    def ask(self, call: scripts.Call) -> str:
        reply = run(self.client, call)
        return text(cast("list[bytes]", reply)[0] if isinstance(reply, list) else reply)

    def join(self, worker: WorkerId, role: str = ROLE) -> None:
        assert self.ask(scripts.register(worker, role, HOUR_US, {"kind": "worker", "capacity": "1"})) == "ok"

    def submit(self, name: str) -> RequestId:
        spec = RequestSpec(id=RequestId(name), graph=GRAPH.name, prompt_ids=(1,), outputs=(TEXT,), session=TALK)
        call = scripts.submit(spec, None, bound=8, stages=[STAGE], edges=[TEXT], gateway=GATEWAY)
        assert self.ask(call) == "ok"
        return spec.id

    def epoch(self, request: RequestId) -> Epoch:
        return Epoch(int(text(self.client.hget(keys.task(request, STAGE), "epoch"))))

    def grant(self, request: RequestId) -> str:
        """Where the grant went."""
        assert self.ask(scripts.grant(self.leader, request, STAGE, ROLE, self.epoch(request))) == "ok"
        waits = {ROLE: self.client.xlen(keys.role(ROLE))}
        waits |= {worker: self.client.xlen(keys.inbox(worker)) for worker in (KEEPER, OTHER)}
        return ",".join(name for name, count in waits.items() if count)

    def claim(self, request: RequestId, worker: WorkerId) -> str:
        entries = cast("list[tuple[bytes, object]]", self.client.xrange(keys.role(ROLE)))
        entry = text(entries[0][0]) if entries else ""
        return self.ask(scripts.claim(worker, ROLE, entry, request, STAGE, self.epoch(request)))

    def first_turn(self) -> None:
        first = self.submit("first")
        assert self.grant(first) == ROLE
        assert self.claim(first, KEEPER) == "ok"
        retain = scripts.cache_prefix(first, STAGE, self.epoch(first), KEEPER, TALK, kept=9, reused=0, keep_s=60)
        assert self.ask(retain) == "ok"
        chunk = Chunk(request=first, edge=TEXT, index=0, epoch=self.epoch(first), final=True)
        last = scripts.Append(stage=STAGE, consumer=CLIENT, chunk=chunk, location={}, event=None, finish=True, num_items=1)
        assert self.ask(scripts.append([last])) == "ok"


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    with connect(redis_url) as client:
        bench = Bench(client, text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000))))
        bench.join(GATEWAY, "")
        bench.join(KEEPER)
        bench.join(OTHER)
        bench.first_turn()
        yield bench


def test_next_turn_is_reserved_for_the_caching_worker(bench: Bench) -> None:
    second = bench.submit("second")
    assert bench.grant(second) == KEEPER
    assert bench.claim(second, OTHER) == "stale"
    assert bench.claim(second, KEEPER) == "ok"
    assert bench.client.smembers(keys.worker_tasks(KEEPER)) == {f"{second}|{STAGE}".encode()}


def lapse(bench: Bench) -> None:
    bench.client.zadd(keys.WORKERS, {KEEPER: 1})


def fence(bench: Bench) -> None:
    bench.ask(scripts.fence_worker("", KEEPER))


def drain(bench: Bench) -> None:
    bench.ask(scripts.drain(KEEPER))


def stand_by(bench: Bench) -> None:
    bench.client.hset(keys.worker(KEEPER), "standby", "1")


def serve_another_role(bench: Bench) -> None:
    bench.client.hset(keys.worker(KEEPER), "role", "lm.decode")


def run_a_task(bench: Bench) -> None:
    busy = bench.submit("busy")
    bench.grant(busy)
    assert bench.claim(busy, KEEPER) == "ok"
    bench.client.delete(keys.inbox(KEEPER))


def be_offered_one(bench: Bench) -> None:
    """A slot is taken from the moment a task is put to it, or several would be put to one slot."""
    assert bench.grant(bench.submit("offered")) == KEEPER
    bench.client.delete(keys.inbox(KEEPER))


def forget(bench: Bench) -> None:
    bench.client.delete(keys.cached_prefix(TALK))


@pytest.mark.parametrize(
    "change", [lapse, fence, drain, stand_by, serve_another_role, run_a_task, be_offered_one, forget], ids=lambda f: f.__name__
)
def test_next_turn_is_granted_to_the_role_without_an_available_caching_worker(
    bench: Bench, change: Callable[[Bench], None]
) -> None:
    change(bench)
    second = bench.submit("second")
    assert bench.grant(second) == ROLE
    assert bench.claim(second, OTHER) == "ok"


def test_overdue_turn_is_granted_to_the_role(bench: Bench) -> None:
    second = bench.submit("second")
    assert bench.grant(second) == KEEPER
    late = scripts.claim(KEEPER, ROLE, "", second, STAGE, bench.epoch(second))
    bench.client.hset(keys.worker(KEEPER), "capacity", "9")  # even where it had room for another
    bench.grant(second)
    assert bench.client.xlen(keys.role(ROLE)) == 1
    assert bench.ask(late) == "stale"
    assert bench.client.scard(keys.worker_tasks(KEEPER)) == 0, "its slot is free again"
    assert bench.claim(second, OTHER) == "ok"


@pytest.mark.parametrize("goes", [fence, drain], ids=lambda f: f.__name__)
def test_turn_reserved_for_a_leaving_worker_is_granted_again(bench: Bench, goes: Callable[[Bench], None]) -> None:
    """At once, and without a death being counted: it never held the task."""
    second = bench.submit("second")
    bench.grant(second)
    before = bench.epoch(second)
    goes(bench)
    fields = cast("dict[bytes, bytes]", bench.client.hgetall(keys.task(second, STAGE)))
    assert (fields[b"state"], b"reserved_for" in fields, fields.get(b"deaths")) == (b"lost", False, None)
    assert bench.epoch(second) > before
    assert bench.client.scard(keys.worker_tasks(KEEPER)) == 0
    bench.grant(second)
    assert bench.claim(second, OTHER) == "ok"


def test_request_ended_before_its_claim_frees_the_slot(bench: Bench) -> None:
    second = bench.submit("second")
    bench.grant(second)
    bench.ask(scripts.abort(second, scripts.API_RIGHT, "stop", scripts.Retention()))
    assert bench.client.scard(keys.worker_tasks(KEEPER)) == 0
    assert bench.claim(second, KEEPER) == "ended"


def turn(fleet: ThreadFleet, number: int, *, session: str = TALK, num_tokens: int = 12) -> RequestSpec:
    """Each turn's prompt begins with the last one's."""
    return replace(fake_spec(fleet, prompt_len=10 + 5 * number, num_tokens=num_tokens, seed=number), session=session)


def two_workers(url: str, *overrides: str) -> Iterator[ThreadFleet]:
    with thread_fleet(url, "graph=text", *overrides) as fleet:
        fleet.add_worker(ROLE)
        yield fleet


async def served(client: FleetClient, spec: RequestSpec) -> tuple[WorkerId, int]:
    """Ask; who answered, and how many rows were spared."""
    await answer(client, spec)
    view = await client.telemetry.trace(spec.id)
    assert view is not None
    return WorkerId(view.tasks[0].owner), view.tasks[0].cached_rows


def loop_of(fleet: ThreadFleet, worker: WorkerId) -> WorkerLoop:
    return next(loop for loop in fleet.loops if loop.worker == worker)


def keepers(fleet: ThreadFleet, session: str = TALK) -> set[WorkerId]:
    return {loop.worker for loop in fleet.loops if loop.engine.num_cached_rows(session)}


@pytest.fixture
def fleet(request: pytest.FixtureRequest, redis_url: str) -> Iterator[ThreadFleet]:
    """Two workers of one stage; whatever is put to a worker is never overdue, unless the test's parameter says otherwise."""
    overrides = cast("tuple[str, ...]", getattr(request, "param", ()))
    yield from two_workers(redis_url, *NEVER_OVERDUE, *overrides)


async def test_turn_is_served_by_the_caching_worker_and_computes_only_new_rows(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        first, spared = await served(client, turn(fleet, 0))
        assert spared == 0
        for number in range(1, 8):
            spec = turn(fleet, number)
            assert await served(client, spec) == (first, 10 + 5 * (number - 1))
            assert_same(await answer(client, anew(spec)), await answer(client, anew(spec, session="")))
    assert keepers(fleet) == {first}
    wait_until(lambda: not held(fleet), "workers to hold nothing")


def anew(spec: RequestSpec, *, session: str = TALK) -> RequestSpec:
    return replace(spec, id=new_request_id(), session=session)


async def test_diverging_prompt_reuses_only_the_common_prefix(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        await answer(client, turn(fleet, 2))
        spec = turn(fleet, 2)
        other = replace(spec, prompt_ids=(*spec.prompt_ids[:7], 99, *spec.prompt_ids[8:]))
        assert (await served(client, other))[1] == 7
        again = turn(fleet, 2)
        assert (await served(client, again))[1] == 7, "what is kept is the last turn's"
        assert_same(await answer(client, anew(other)), await answer(client, anew(other, session="")))


async def test_request_without_session_caches_nothing(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        assert (await served(client, turn(fleet, 1, session="")))[1] == 0
        assert (await served(client, turn(fleet, 2, session="")))[1] == 0
    assert not keepers(fleet) and not keepers(fleet, "")
    assert not fleet.clients[0].exists(keys.cached_prefix(""))


FULL = ("stages.lm.max_batch=1", *in_step(GRAPH))


@pytest.mark.parametrize("fleet", [FULL], indirect=True)
async def test_full_caching_worker_is_skipped_immediately(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        blocks = await client.requests.submit(turn(fleet, 1), None)
        wait_until(lambda: blocks.request_id in loop_of(fleet, keeper).tasks, "the keeper to be busy with the second turn")
        other, spared = await served(client, turn(fleet, 2))
        assert (other != keeper, spared) == (True, 0)
        await blocks.abort("enough")
        wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
        assert keepers(fleet) == {keeper, other}, "the aborted turn gives back what it began with"
        assert await served(client, turn(fleet, 3)) == (other, 20)


async def test_aborted_turn_keeps_its_cached_prefix(fleet: ThreadFleet) -> None:
    """A user who goes on speaking after a pause aborts a turn each time."""
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        for _ in range(3):
            aborted = await client.requests.submit(turn(fleet, 1), None)
            wait_until(lambda: aborted.request_id in loop_of(fleet, keeper).tasks, "the turn to be taken")  # noqa: B023
            await aborted.abort("the user goes on")
            wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
        worker, spared = await served(client, turn(fleet, 1))
    assert worker == keeper and spared >= 10


@pytest.mark.parametrize("fleet", [in_step(GRAPH)], indirect=True)
async def test_aborted_first_turn_caches_nothing(fleet: ThreadFleet) -> None:
    """Nobody listens, so it is at work until it is aborted."""
    async with gateway(fleet) as client:
        first = await client.requests.submit(turn(fleet, 0, num_tokens=2000), None)
        wait_until(lambda: any(first.request_id in loop.tasks for loop in fleet.loops), "the turn to be taken")
        await first.abort("enough")
        wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
    assert not keepers(fleet)


async def test_dead_caching_worker_is_skipped_immediately(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        stop(fleet, keeper)
        fleet.fence(loop_of(fleet, keeper))
        other, spared = await served(client, turn(fleet, 1))
    assert (other != keeper, spared) == (True, 0)


async def test_draining_caching_worker_is_skipped_immediately(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        assert text(run(fleet.clients[0], scripts.drain(keeper))) == "ok"
        loop = loop_of(fleet, keeper)
        loop.availability.draining, polled = True, loop.maintenance.next_poll_s
        wait_until(lambda: loop.maintenance.next_poll_s != polled, "its loop to have turned since")
        assert (await served(client, turn(fleet, 1)))[0] != keeper


async def test_turn_reserved_for_a_lost_worker_is_granted_again(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        stop(fleet, keeper)
        spec = turn(fleet, 1)
        asked = asyncio.create_task(served(client, spec))
        key = keys.task(spec.id, STAGE)
        await await_until(
            lambda: asyncio.to_thread(fleet.clients[0].hexists, key, "reserved_for"), "the turn to be put to the keeper"
        )
        await asyncio.to_thread(fleet.fence, loop_of(fleet, keeper))
        assert (await asked)[0] != keeper


@pytest.mark.parametrize("fleet", [("lease.claim_timeout_s=0.3",)], indirect=True)
async def test_frozen_caching_worker_loses_an_overdue_turn(fleet: ThreadFleet) -> None:
    """Its lease still runs, so nobody knows better."""
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        stop(fleet, keeper)
        assert (await served(client, turn(fleet, 1)))[0] != keeper


@pytest.mark.parametrize("fleet", [("lease.claim_timeout_s=0.3", *in_step(GRAPH))], indirect=True)
async def test_caching_worker_running_a_suspect_claims_no_turn(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        suspect = await client.requests.submit(turn(fleet, 1), None)
        loop = loop_of(fleet, keeper)
        wait_until(lambda: suspect.request_id in loop.tasks, "the keeper to be busy with the second turn")
        loop.tasks[suspect.request_id].alone = True
        assert (await served(client, turn(fleet, 2)))[0] != keeper
        await suspect.abort("enough")


def stop(fleet: ThreadFleet, worker: WorkerId) -> None:
    """Its loop turns no more, as if frozen; its lease stands."""
    loop = loop_of(fleet, worker)
    thread = fleet.threads[1 + fleet.loops.index(loop)]
    fleet.killed.add(worker)
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize("fleet", [("lease.prefix_cache_s=0.5",)], indirect=True)
async def test_cached_prefix_expires(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        await answer(client, turn(fleet, 0))
        assert keepers(fleet)
        wait_until(lambda: not keepers(fleet), "the prefix to be given up")
        wait_until(lambda: not fleet.clients[0].exists(keys.cached_prefix(TALK)), "its key to expire")
        assert (await served(client, turn(fleet, 1)))[1] == 0


@pytest.mark.parametrize("fleet", [("limits.max_cached_conversations=2",)], indirect=True)
async def test_number_of_cached_conversations_is_bounded(fleet: ThreadFleet) -> None:
    stop(fleet, fleet.loops[1].worker)
    fleet.fence(fleet.loops[1])
    async with gateway(fleet) as client:
        for session in ("a", "b", "a", "c"):
            await answer(client, turn(fleet, 0, session=session))
    assert [session for session in "abc" if keepers(fleet, session)] == ["a", "c"]


@pytest.mark.parametrize("fleet", [("limits.max_cached_conversations=0",), ("lease.prefix_cache_s=0",)], indirect=True)
async def test_prefix_cache_can_be_disabled(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        for number in range(3):
            assert (await served(client, turn(fleet, number)))[1] == 0
    assert not keepers(fleet)


async def test_split_stage_caches_nothing(redis_url: str) -> None:
    """Whoever ends a task there is not who begins the next one."""
    halves = ("stages.lm.split.prefill.replicas=1", "stages.lm.split.decode.replicas=1")
    with thread_fleet(redis_url, "graph=text", *NEVER_OVERDUE, *halves) as fleet:
        async with gateway(fleet) as client:
            for number in range(3):
                assert (await served(client, turn(fleet, number)))[1] == 0
                assert_same(await answer(client, turn(fleet, number)), await answer(client, turn(fleet, number, session="")))
        assert not keepers(fleet)


async def test_refused_cache_write_frees_the_rows(fleet: ThreadFleet) -> None:
    """It was fenced after its engine had done with the task, and before it could say so."""
    async with gateway(fleet) as client:
        keeper, _ = await served(client, turn(fleet, 0))
        loop = loop_of(fleet, keeper)
        stop(fleet, keeper)
        asked = await client.requests.submit(spec := turn(fleet, 1), None)
        call = scripts.cache_prefix(spec.id, STAGE, Epoch(1), keeper, TALK, kept=3, reused=0, keep_s=60)
        assert loop.engine.num_cached_rows(TALK)
        loop.cached_sessions._settle(TALK, run(fleet.clients[0], call), was_announced=True)  # pyright: ignore[reportPrivateUsage]
        assert not loop.engine.num_cached_rows(TALK)
        await asked.abort("enough")
