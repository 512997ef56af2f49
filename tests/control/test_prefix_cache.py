"""Prefix caching: a conversation's next turn goes to the worker that caches its prefix, if that
worker has room, and computes only the new rows.

The answer does not depend on the worker.
"""

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import redis
from msgspec.structs import replace

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run
from fleet.core.ids import Epoch, RequestId, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from fleet.worker.loop.loop import WorkerLoop
from tests.capabilities import prefixes_of
from tests.control_plane import GATEWAY, OTHER, ROLE, STAGE, WORKER, Control, set_deadline
from tests.harness import (
    ThreadFleet,
    answer,
    assert_same,
    fake_spec,
    gateway,
    held,
    in_step,
    thread_fleet,
)
from tests.support import wait_until

GRAPH = get_graph("text")
SESSION, CACHING = "talk", WORKER
NEVER_OVERDUE = ("lease.claim_timeout_s=3600", "lease.no_worker_timeout_s=3600")


class PrefixCacheBench(Control):
    """Two workers with one slot each, of which one has cached the prefix of conversation SESSION
    since its first turn.
    """

    def turn(self, name: str) -> RequestId:
        assert self.submit(name, session=SESSION)[0] == "ok"
        return RequestId(name)

    def waiting_at(self) -> str:
        """Return the role or worker whose queue holds a grant."""
        waits = {ROLE: len(self.grants())}
        waits |= {worker: len(self.inbox(worker)) for worker in (CACHING, OTHER)}
        return ",".join(name for name, count in waits.items() if count)

    def take(self, request: RequestId, worker: WorkerId) -> str:
        return self.claim(worker=worker, request=request)

    def first_turn(self) -> None:
        first = self.turn("first")
        assert self.waiting_at() == ROLE
        assert self.take(first, CACHING) == "ok"
        epoch = self.epoch(request=first)
        retain = scripts.cache_prefix(
            first, STAGE, epoch, CACHING, SESSION, num_rows=9, reused=0, keep_s=60
        )
        assert self.run(retain) == "ok"
        assert self.append(epoch, finish=True, request=first) == "ok"


@pytest.fixture
def bench(client: redis.Redis) -> PrefixCacheBench:
    bench = PrefixCacheBench(client)
    bench.lead()
    for worker, role in ((GATEWAY, ""), (CACHING, ROLE), (OTHER, ROLE)):
        assert bench.register(worker, role, capacity="1") == "ok"
    bench.first_turn()
    return bench


def test_next_turn_is_reserved_for_the_caching_worker(bench: PrefixCacheBench) -> None:
    second = bench.turn("second")
    assert bench.waiting_at() == CACHING
    assert bench.take(second, OTHER) == "stale"
    assert bench.take(second, CACHING) == "ok"
    assert bench.tasks_of(CACHING) == {f"{second}|{STAGE}".encode()}


def run_a_task(bench: PrefixCacheBench) -> None:
    assert bench.take(bench.turn("busy"), CACHING) == "ok"
    bench.client.delete(keys.inbox(CACHING))


def reserve_a_slot(bench: PrefixCacheBench) -> None:
    """Offer a task to the caching worker. Its slot counts as used from that moment; otherwise
    several tasks could be offered for one slot.
    """
    bench.turn("offered")
    assert bench.waiting_at() == CACHING
    bench.client.delete(keys.inbox(CACHING))


CHANGES: dict[str, Callable[[PrefixCacheBench], object]] = {
    "lapsed": lambda bench: set_deadline(bench.client, CACHING, 1),
    "fenced": lambda bench: bench.leave(CACHING),
    "draining": lambda bench: bench.drain(CACHING),
    "standing by": lambda bench: bench.client.hset(keys.worker(CACHING), "standby", "1"),
    "of another role": lambda bench: bench.client.hset(keys.worker(CACHING), "role", "lm.decode"),
    "running a task": run_a_task,
    "reserved": reserve_a_slot,
    "without the prefix": lambda bench: bench.client.delete(keys.cached_prefix(SESSION)),
}
"""States of the caching worker in which it receives no further turn, each with a function that
brings it about.
"""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_next_turn_is_granted_to_the_role_without_an_available_caching_worker(
    bench: PrefixCacheBench, change: Callable[[PrefixCacheBench], object]
) -> None:
    change(bench)
    second = bench.turn("second")
    assert bench.waiting_at() == ROLE
    assert bench.take(second, OTHER) == "ok"


def test_overdue_turn_is_granted_to_the_role(bench: PrefixCacheBench) -> None:
    second = bench.turn("second")
    assert bench.waiting_at() == CACHING
    old = bench.epoch(request=second)
    # a grant may not return even to a worker with room for another task
    bench.client.hset(keys.worker(CACHING), "capacity", "9")
    assert bench.watch() == "ok"
    assert len(bench.grants()) == 1
    assert bench.claim(old, CACHING, second) == "stale"
    assert bench.tasks_of(CACHING) == set(), "its slot is free again"
    assert bench.take(second, OTHER) == "ok"


@pytest.mark.parametrize("change", ["fenced", "draining"])
def test_turn_reserved_for_a_leaving_worker_is_granted_again(
    bench: PrefixCacheBench, change: str
) -> None:
    """A turn offered to a worker that leaves is granted again immediately, and no death is counted,
    since the worker never owned the task.
    """
    second = bench.turn("second")
    before = bench.epoch(request=second)
    CHANGES[change](bench)
    task = bench.task(request=second)
    assert task["state"] == "granted" and not task.keys() & {"reserved_for", "deaths"}
    assert bench.epoch(request=second) > before
    assert bench.tasks_of(CACHING) == set()
    assert bench.take(second, OTHER) == "ok"


def test_request_ended_before_its_claim_frees_the_slot(bench: PrefixCacheBench) -> None:
    second = bench.turn("second")
    bench.abort(second)
    assert bench.tasks_of(CACHING) == set()
    assert bench.take(second, CACHING) == "ended"


def make_turn(
    fleet: ThreadFleet, number: int, *, session: str = SESSION, num_tokens: int = 12
) -> RequestSpec:
    """Return a turn whose prompt begins with the preceding turn's prompt."""
    return replace(
        fake_spec(fleet, prompt_len=10 + 5 * number, num_tokens=num_tokens, seed=number),
        session=session,
    )


async def serve(client: FleetClient, spec: RequestSpec) -> tuple[WorkerId, int]:
    """Submit a request; return the worker that answered it, and its number of cached rows."""
    await answer(client, spec)
    view = await client.telemetry.trace(spec.id)
    assert view is not None
    return WorkerId(view.tasks[0].owner), view.tasks[0].cached_rows


def loop_of(fleet: ThreadFleet, worker: WorkerId) -> WorkerLoop:
    return next(loop for loop in fleet.loops if loop.worker == worker)


def wait_claimed(fleet: ThreadFleet, worker: WorkerId, request: RequestId) -> None:
    wait_until(lambda: request in loop_of(fleet, worker).tasks, "the turn to be claimed")


def caching_workers(fleet: ThreadFleet, session: str = SESSION) -> set[WorkerId]:
    return {loop.worker for loop in fleet.loops if prefixes_of(loop.engine).num_rows(session)}


@pytest.fixture
def fleet(request: pytest.FixtureRequest, redis_url: str) -> Iterator[ThreadFleet]:
    """A fleet with two workers of one stage. A grant to a worker is never overdue, unless the
    test's parameter overrides the setting.
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
        wait_claimed(fleet, caching_worker, blocking.request_id)
        other, num_cached = await serve(client, make_turn(fleet, 2))
        assert (other != caching_worker, num_cached) == (True, 0)
        await blocking.abort("enough")
        wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
        assert caching_workers(fleet) == {caching_worker, other}, (
            "the aborted turn returns the prefix it began with"
        )
        assert await serve(client, make_turn(fleet, 3)) == (other, 20)


async def test_aborted_turn_keeps_its_cached_prefix(fleet: ThreadFleet) -> None:
    """An aborted turn leaves its prefix in the cache, since a user who continues speaking after a
    pause aborts a turn each time.
    """
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        for _ in range(3):
            aborted = await client.requests.submit(make_turn(fleet, 1), None)
            wait_claimed(fleet, caching_worker, aborted.request_id)
            await aborted.abort("the user continues")
            wait_until(lambda: not held(fleet), "the aborted turn to be dropped")
        worker, num_cached = await serve(client, make_turn(fleet, 1))
    assert worker == caching_worker and num_cached >= 10


@pytest.mark.parametrize("fleet", [("lease.claim_timeout_s=0.3",)], indirect=True)
async def test_frozen_caching_worker_loses_an_overdue_turn(fleet: ThreadFleet) -> None:
    """A turn offered to a frozen caching worker goes to another worker once the claim is overdue:
    the frozen worker's lease is still valid, so that nothing else shows the freeze.
    """
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        stop(fleet, caching_worker)
        assert (await serve(client, make_turn(fleet, 1)))[0] != caching_worker


@pytest.mark.parametrize("fleet", [("lease.claim_timeout_s=0.3", *in_step(GRAPH))], indirect=True)
async def test_caching_worker_running_a_suspect_claims_no_turn(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        caching_worker, _ = await serve(client, make_turn(fleet, 0))
        suspect = await client.requests.submit(make_turn(fleet, 1), None)
        wait_claimed(fleet, caching_worker, suspect.request_id)
        loop_of(fleet, caching_worker).tasks[suspect.request_id].alone = True
        assert (await serve(client, make_turn(fleet, 2)))[0] != caching_worker
        await suspect.abort("enough")


def stop(fleet: ThreadFleet, worker: WorkerId) -> None:
    """End the worker loop's thread, as if the worker were frozen; its lease stays valid."""
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
    """A split stage caches no prefix, since the worker that finishes a task is not the one that
    begins the next.
    """
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
    """A worker that was fenced after its engine finished a task, and before it wrote the cache
    entry, frees the cached rows.
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
        settle = loop.parts.cached_sessions._settle  # pyright: ignore[reportPrivateUsage]
        settle(SESSION, run(fleet.clients[0], call), was_announced=True)
        assert not prefixes_of(loop.engine).num_rows(SESSION)
        await pending.abort("enough")
