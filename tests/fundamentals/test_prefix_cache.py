"""A conversation's next turn goes to the worker that caches its prefix, if that worker has room,
and computes only new rows.

The answer is independent of the worker.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest
import redis
from msgspec.structs import replace

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import first_text, run, text
from fleet.core.chunk import Chunk
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from fleet.worker.loop.loop import WorkerLoop
from tests.capabilities import prefixes_of
from tests.fundamentals.control_plane import set_deadline
from tests.harness import (
    ThreadFleet,
    answer,
    assert_same,
    fake_spec,
    gateway,
    held,
    in_step,
    stop_claims,
    thread_fleet,
)
from tests.support import await_until, wait_until

GRAPH = get_graph("text")
STAGE, ROLE, TEXT = GRAPH.stages[0].name, RoleName(GRAPH.stages[0].name), GRAPH.edges[0].name
SESSION, CACHING, OTHER, GATEWAY = (
    "talk",
    WorkerId("lm@test:1:a"),
    WorkerId("lm@test:2:b"),
    WorkerId("gateway@test:1:a"),
)
HOUR_US = 3_600_000_000
NEVER_OVERDUE = ("lease.claim_timeout_s=3600", "lease.no_worker_timeout_s=3600")


@dataclass(slots=True)
class PrefixCacheBench:
    """A leader, a gateway and two workers, one of which caches the prefix of SESSION since its
    first turn; no process.
    """

    client: redis.Redis
    leader: str

    def call_script(self, call: scripts.Call) -> str:
        return first_text(run(self.client, call))

    def join(self, worker: WorkerId, role: str) -> None:
        assert (
            self.call_script(
                scripts.register(worker, role, HOUR_US, {"kind": "worker", "capacity": "1"})
            )
            == "ok"
        )

    def submit(self, name: str) -> RequestId:
        spec = RequestSpec(
            id=RequestId(name), graph=GRAPH.name, prompt_ids=(1,), outputs=(TEXT,), session=SESSION
        )
        call = scripts.submit(spec, None, bound=8, stages=[STAGE], edges=[TEXT], gateway=GATEWAY)
        assert self.call_script(call) == "ok"
        return spec.id

    def epoch(self, request: RequestId) -> Epoch:
        return Epoch(int(text(self.client.hget(keys.task(request, STAGE), "epoch"))))

    def grant_again(self, request: RequestId) -> None:
        """Grant the task again as the leader does when it is overdue."""
        assert (
            self.call_script(scripts.grant(self.leader, request, STAGE, ROLE, self.epoch(request)))
            == "ok"
        )

    def waiting_at(self) -> str:
        """Return the role or worker whose queue holds a grant."""
        waits = {ROLE: self.client.xlen(keys.role(ROLE))}
        waits |= {worker: self.client.xlen(keys.inbox(worker)) for worker in (CACHING, OTHER)}
        return ",".join(name for name, count in waits.items() if count)

    def claim(self, request: RequestId, worker: WorkerId) -> str:
        entries = cast("list[tuple[bytes, object]]", self.client.xrange(keys.role(ROLE)))
        entry = text(entries[0][0]) if entries else ""
        return self.call_script(
            scripts.claim(worker, ROLE, entry, request, STAGE, self.epoch(request))
        )

    def first_turn(self) -> None:
        first = self.submit("first")
        assert self.waiting_at() == ROLE
        assert self.claim(first, CACHING) == "ok"
        retain = scripts.cache_prefix(
            first, STAGE, self.epoch(first), CACHING, SESSION, num_rows=9, reused=0, keep_s=60
        )
        assert self.call_script(retain) == "ok"
        chunk = Chunk(request=first, edge=TEXT, index=0, epoch=self.epoch(first), final=True)
        last = scripts.Append(
            stage=STAGE,
            consumer=CLIENT,
            chunk=chunk,
            location={},
            event=None,
            finish=True,
            num_items=1,
        )
        assert self.call_script(scripts.append([last])) == "ok"


@pytest.fixture
def bench(client: redis.Redis) -> PrefixCacheBench:
    bench = PrefixCacheBench(
        client, text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    )
    for worker, role in ((GATEWAY, ""), (CACHING, ROLE), (OTHER, ROLE)):
        bench.join(worker, role)
    bench.first_turn()
    return bench


def test_next_turn_is_reserved_for_the_caching_worker(bench: PrefixCacheBench) -> None:
    second = bench.submit("second")
    assert bench.waiting_at() == CACHING
    assert bench.claim(second, OTHER) == "stale"
    assert bench.claim(second, CACHING) == "ok"
    assert bench.client.smembers(keys.worker_tasks(CACHING)) == {f"{second}|{STAGE}".encode()}


def fence(bench: PrefixCacheBench) -> None:
    bench.call_script(scripts.fence_worker("", CACHING))


def drain(bench: PrefixCacheBench) -> None:
    bench.call_script(scripts.drain(CACHING))


def run_a_task(bench: PrefixCacheBench) -> None:
    busy = bench.submit("busy")
    assert bench.claim(busy, CACHING) == "ok"
    bench.client.delete(keys.inbox(CACHING))


def reserve_a_slot(bench: PrefixCacheBench) -> None:
    """A slot counts as used from the moment a task is offered for it; otherwise several tasks would
    be offered for one slot.
    """
    bench.submit("offered")
    assert bench.waiting_at() == CACHING
    bench.client.delete(keys.inbox(CACHING))


CHANGES: dict[str, Callable[[PrefixCacheBench], object]] = {
    "lapsed": lambda bench: set_deadline(bench.client, CACHING, 1),
    "fenced": fence,
    "draining": drain,
    "standing by": lambda bench: bench.client.hset(keys.worker(CACHING), "standby", "1"),
    "of another role": lambda bench: bench.client.hset(keys.worker(CACHING), "role", "lm.decode"),
    "running a task": run_a_task,
    "reserved": reserve_a_slot,
    "without the prefix": lambda bench: bench.client.delete(keys.cached_prefix(SESSION)),
}
"""States of the caching worker in which it receives no further turn."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_next_turn_is_granted_to_the_role_without_an_available_caching_worker(
    bench: PrefixCacheBench, change: Callable[[PrefixCacheBench], object]
) -> None:
    change(bench)
    second = bench.submit("second")
    assert bench.waiting_at() == ROLE
    assert bench.claim(second, OTHER) == "ok"


def test_overdue_turn_is_granted_to_the_role(bench: PrefixCacheBench) -> None:
    second = bench.submit("second")
    assert bench.waiting_at() == CACHING
    late = scripts.claim(CACHING, ROLE, "", second, STAGE, bench.epoch(second))
    # a grant may not return even to a worker with room for another task
    bench.client.hset(keys.worker(CACHING), "capacity", "9")
    bench.grant_again(second)
    assert bench.client.xlen(keys.role(ROLE)) == 1
    assert bench.call_script(late) == "stale"
    assert bench.client.scard(keys.worker_tasks(CACHING)) == 0, "its slot is free again"
    assert bench.claim(second, OTHER) == "ok"


@pytest.mark.parametrize("leave", [fence, drain], ids=lambda f: f.__name__)
def test_turn_reserved_for_a_leaving_worker_is_granted_again(
    bench: PrefixCacheBench, leave: Callable[[PrefixCacheBench], None]
) -> None:
    """Immediately, and without counting a death: the worker never owned the task."""
    second = bench.submit("second")
    before = bench.epoch(second)
    leave(bench)
    fields = cast("dict[bytes, bytes]", bench.client.hgetall(keys.task(second, STAGE)))
    assert (fields[b"state"], b"reserved_for" in fields, fields.get(b"deaths")) == (
        b"granted",
        False,
        None,
    )
    assert bench.epoch(second) > before
    assert bench.client.scard(keys.worker_tasks(CACHING)) == 0
    assert bench.claim(second, OTHER) == "ok"


def test_request_ended_before_its_claim_frees_the_slot(bench: PrefixCacheBench) -> None:
    second = bench.submit("second")
    bench.call_script(scripts.abort(second, scripts.API_RIGHT, "stop"))
    assert bench.client.scard(keys.worker_tasks(CACHING)) == 0
    assert bench.claim(second, CACHING) == "ended"


def make_turn(
    fleet: ThreadFleet, number: int, *, session: str = SESSION, num_tokens: int = 12
) -> RequestSpec:
    """Return a turn whose prompt begins with that of the preceding turn."""
    return replace(
        fake_spec(fleet, prompt_len=10 + 5 * number, num_tokens=num_tokens, seed=number),
        session=session,
    )


async def serve(client: FleetClient, spec: RequestSpec) -> tuple[WorkerId, int]:
    """Submit a request; return the worker that answered and the number of cached rows."""
    await answer(client, spec)
    view = await client.telemetry.trace(spec.id)
    assert view is not None
    return WorkerId(view.tasks[0].owner), view.tasks[0].cached_rows


def _has_claimed(loop: WorkerLoop, request_id: RequestId) -> bool:
    return request_id in loop.tasks


def loop_of(fleet: ThreadFleet, worker: WorkerId) -> WorkerLoop:
    return next(loop for loop in fleet.loops if loop.worker == worker)


def caching_workers(fleet: ThreadFleet, session: str = SESSION) -> set[WorkerId]:
    return {loop.worker for loop in fleet.loops if prefixes_of(loop.engine).num_rows(session)}


@pytest.fixture
def fleet(request: pytest.FixtureRequest, redis_url: str) -> Iterator[ThreadFleet]:
    """Two workers of one stage; a grant to a worker is never overdue, unless the test's parameter
    overrides it.
    """
    overrides = cast("tuple[str, ...]", getattr(request, "param", ()))
    with thread_fleet(redis_url, "graph=text", *NEVER_OVERDUE, *overrides) as fleet:
        fleet.add_worker(ROLE)
        yield fleet


async def test_turn_is_served_by_the_caching_worker_and_computes_only_new_rows(
    fleet: ThreadFleet,
) -> None:
    async with gateway(fleet) as client:
        first, num_cached = await serve(client, make_turn(fleet, 0))
        assert num_cached == 0
        for number in range(1, 8):
            spec = make_turn(fleet, number)
            assert await serve(client, spec) == (first, 10 + 5 * (number - 1))
            assert_same(
                await answer(client, repeat(spec)), await answer(client, repeat(spec, session=""))
            )
    assert caching_workers(fleet) == {first}
    wait_until(lambda: not held(fleet), "workers to hold nothing")


def repeat(spec: RequestSpec, *, session: str = SESSION) -> RequestSpec:
    return replace(spec, id=new_request_id(), session=session)


async def test_diverging_prompt_reuses_only_the_common_prefix(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        await answer(client, make_turn(fleet, 2))
        spec = make_turn(fleet, 2)
        other = replace(spec, prompt_ids=(*spec.prompt_ids[:7], 99, *spec.prompt_ids[8:]))
        assert (await serve(client, other))[1] == 7
        again = make_turn(fleet, 2)
        assert (await serve(client, again))[1] == 7, "only the last turn is cached"
        assert_same(
            await answer(client, repeat(other)), await answer(client, repeat(other, session=""))
        )


async def test_request_without_session_caches_nothing(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        assert (await serve(client, make_turn(fleet, 1, session="")))[1] == 0
        assert (await serve(client, make_turn(fleet, 2, session="")))[1] == 0
    assert not caching_workers(fleet) and not caching_workers(fleet, "")
    assert not fleet.clients[0].exists(keys.cached_prefix(""))


FULL = ("stages.lm.max_batch=1", *in_step(GRAPH))


@pytest.mark.parametrize("fleet", [FULL], indirect=True)
async def test_full_caching_worker_is_skipped_immediately(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        blocking = await client.requests.submit(make_turn(fleet, 1), None)
        wait_until(
            lambda: blocking.request_id in loop_of(fleet, caching_worker).tasks,
            "the caching worker to be busy with the second turn",
        )
        other, num_cached = await serve(client, make_turn(fleet, 2))
        assert (other != caching_worker, num_cached) == (True, 0)
        await blocking.abort("enough")
        wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
        assert caching_workers(fleet) == {caching_worker, other}, (
            "the aborted turn returns the prefix it began with"
        )
        assert await serve(client, make_turn(fleet, 3)) == (other, 20)


async def test_aborted_turn_keeps_its_cached_prefix(fleet: ThreadFleet) -> None:
    """A user who continues speaking after a pause aborts a turn each time."""
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        for _ in range(3):
            aborted = await client.requests.submit(make_turn(fleet, 1), None)
            wait_until(
                partial(_has_claimed, loop_of(fleet, caching_worker), aborted.request_id),
                "the turn to be claimed",
            )
            await aborted.abort("the user continues")
            wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
        worker, num_cached = await serve(client, make_turn(fleet, 1))
    assert worker == caching_worker and num_cached >= 10


@pytest.mark.parametrize("fleet", [in_step(GRAPH)], indirect=True)
async def test_aborted_first_turn_caches_nothing(fleet: ThreadFleet) -> None:
    """The answer is not read, so that the task runs until it is aborted."""
    async with gateway(fleet) as client:
        first = await client.requests.submit(make_turn(fleet, 0, num_tokens=2000), None)
        wait_until(
            lambda: any(first.request_id in loop.tasks for loop in fleet.loops),
            "the turn to be claimed",
        )
        await first.abort("enough")
        wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
    assert not caching_workers(fleet)


async def test_dead_caching_worker_is_skipped_immediately(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        stop(fleet, caching_worker)
        fleet.fence(loop_of(fleet, caching_worker))
        other, num_cached = await serve(client, make_turn(fleet, 1))
    assert (other != caching_worker, num_cached) == (True, 0)


async def test_draining_caching_worker_is_skipped_immediately(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        assert text(run(fleet.clients[0], scripts.drain(caching_worker))) == "ok"
        stop_claims(loop_of(fleet, caching_worker))
        assert (await serve(client, make_turn(fleet, 1)))[0] != caching_worker


async def test_turn_reserved_for_a_lost_worker_is_granted_again(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        stop(fleet, caching_worker)
        spec = make_turn(fleet, 1)
        pending = asyncio.create_task(serve(client, spec))
        key = keys.task(spec.id, STAGE)
        await await_until(
            lambda: asyncio.to_thread(fleet.clients[0].hexists, key, "reserved_for"),
            "the turn to be reserved for the caching worker",
        )
        await asyncio.to_thread(fleet.fence, loop_of(fleet, caching_worker))
        assert (await pending)[0] != caching_worker


@pytest.mark.parametrize("fleet", [("lease.claim_timeout_s=0.3",)], indirect=True)
async def test_frozen_caching_worker_loses_an_overdue_turn(fleet: ThreadFleet) -> None:
    """Its lease is still valid, so that only the overdue claim shows the freeze."""
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        stop(fleet, caching_worker)
        assert (await serve(client, make_turn(fleet, 1)))[0] != caching_worker


@pytest.mark.parametrize("fleet", [("lease.claim_timeout_s=0.3", *in_step(GRAPH))], indirect=True)
async def test_caching_worker_running_a_suspect_claims_no_turn(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        suspect = await client.requests.submit(make_turn(fleet, 1), None)
        loop = loop_of(fleet, caching_worker)
        wait_until(
            lambda: suspect.request_id in loop.tasks,
            "the caching worker to be busy with the second turn",
        )
        loop.tasks[suspect.request_id].alone = True
        assert (await serve(client, make_turn(fleet, 2)))[0] != caching_worker
        await suspect.abort("enough")


def stop(fleet: ThreadFleet, worker: WorkerId) -> None:
    """End the loop's thread, as if the worker were frozen; its lease stands."""
    loop = loop_of(fleet, worker)
    thread = fleet.threads[1 + fleet.loops.index(loop)]
    fleet.killed.add(worker)
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize("fleet", [("lease.prefix_cache_s=0.5",)], indirect=True)
async def test_cached_prefix_expires(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        await answer(client, make_turn(fleet, 0))
        assert caching_workers(fleet)
        wait_until(lambda: not caching_workers(fleet), "the prefix to be dropped")
        wait_until(
            lambda: not fleet.clients[0].exists(keys.cached_prefix(SESSION)),
            "the key of the prefix to expire",
        )
        assert (await serve(client, make_turn(fleet, 1)))[1] == 0


@pytest.mark.parametrize("fleet", [("limits.max_cached_conversations=2",)], indirect=True)
async def test_number_of_cached_conversations_is_bounded(fleet: ThreadFleet) -> None:
    stop(fleet, fleet.loops[1].worker)
    fleet.fence(fleet.loops[1])
    async with gateway(fleet) as client:
        for session in ("a", "b", "a", "c"):
            await answer(client, make_turn(fleet, 0, session=session))
    assert [session for session in "abc" if caching_workers(fleet, session)] == ["a", "c"]


@pytest.mark.parametrize(
    "fleet", [("limits.max_cached_conversations=0",), ("lease.prefix_cache_s=0",)], indirect=True
)
async def test_prefix_cache_can_be_disabled(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        for number in range(3):
            assert (await serve(client, make_turn(fleet, number)))[1] == 0
    assert not caching_workers(fleet)


async def test_split_stage_caches_nothing(redis_url: str) -> None:
    """The worker that finishes a task there is not the one that begins the next."""
    halves = ("stages.lm.split.prefill.replicas=1", "stages.lm.split.decode.replicas=1")
    with thread_fleet(redis_url, "graph=text", *NEVER_OVERDUE, *halves) as fleet:
        async with gateway(fleet) as client:
            for number in range(3):
                assert (await serve(client, make_turn(fleet, number)))[1] == 0
                assert_same(
                    await answer(client, make_turn(fleet, number)),
                    await answer(client, make_turn(fleet, number, session="")),
                )
        assert not caching_workers(fleet)


async def test_refused_cache_write_frees_the_rows(fleet: ThreadFleet) -> None:
    """The worker was fenced after its engine finished the task, and before it could write the cache
    entry.
    """
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        loop = loop_of(fleet, caching_worker)
        stop(fleet, caching_worker)
        pending = await client.requests.submit(spec := make_turn(fleet, 1), None)
        call = scripts.cache_prefix(
            spec.id, STAGE, Epoch(1), caching_worker, SESSION, num_rows=3, reused=0, keep_s=60
        )
        assert prefixes_of(loop.engine).num_rows(SESSION)
        loop.parts.cached_sessions._settle(SESSION, run(fleet.clients[0], call), was_announced=True)  # pyright: ignore[reportPrivateUsage]
        assert not prefixes_of(loop.engine).num_rows(SESSION)
        await pending.abort("enough")
