"""A drained worker finishes its tasks and claims no others; a resumed one claims tasks again; a
stopped one leaves.
"""

import asyncio

import pytest

from fleet.control.client import FleetClient
from fleet.core.errors import Conflict, NotFound
from fleet.telemetry.views import WorkerView
from tests.harness import answer, collected, fake_spec, open_fleet
from tests.support import await_until

STAGE = "talker"


async def find_worker(client: FleetClient, worker: str) -> WorkerView:
    return next(
        view for view in await client.telemetry.workers(with_gone=True) if view.id == worker
    )


async def test_drained_worker_finishes_its_tasks_and_claims_no_others(redis_url: str) -> None:
    async with open_fleet(redis_url, "edges.audio.credits=4") as (fleet, client):
        first = next(loop for loop in fleet.loops if loop.stage == STAGE)
        spec = fake_spec(fleet, num_tokens=60)
        stream = await client.requests.submit(spec, None)
        begun = await anext(aiter(stream))
        await asyncio.to_thread(fleet.owner, spec.id, first.stage)
        await client.operations.order_worker(first.worker, "drain")
        await await_until(lambda: _is(first.availability.draining), "the worker to read the order")
        view = await find_worker(client, first.worker)
        assert view.state == "draining" and [task.request for task in view.tasks] == [spec.id]
        other = await asyncio.to_thread(fleet.add_worker, STAGE)
        later = fake_spec(fleet, seed=2)
        await answer(client, later)
        await collected(stream, spec)
        assert begun.request == spec.id
        traces = {r: await client.telemetry.trace(r) for r in (spec.id, later.id)}
        owners = {
            r: t.owner
            for r, trace in traces.items()
            if trace
            for t in trace.tasks
            if t.stage == STAGE
        }
        assert owners == {spec.id: first.worker, later.id: other.worker}
        await client.operations.order_worker(first.worker, "resume")
        await client.operations.order_worker(other.worker, "drain")
        await await_until(
            lambda: _is(not first.availability.draining and other.availability.draining),
            "both workers to read their orders",
        )
        again = fake_spec(fleet, seed=3)
        await answer(client, again)
        trace = await client.telemetry.trace(again.id)
        assert (
            trace is not None
            and next(t.owner for t in trace.tasks if t.stage == STAGE) == first.worker
        )


async def test_stopped_worker_leaves_after_its_tasks(redis_url: str) -> None:
    async with open_fleet(redis_url, "edges.audio.credits=4") as (fleet, client):
        loop = next(loop for loop in fleet.loops if loop.stage == STAGE)
        spec = fake_spec(fleet, num_tokens=60)
        stream = await client.requests.submit(spec, None)
        await anext(aiter(stream))
        await asyncio.to_thread(fleet.owner, spec.id, loop.stage)
        await client.operations.order_worker(loop.worker, "stop")
        await await_until(lambda: _is(loop.availability.leaving), "the worker to read the order")
        assert not loop.may_leave(), "the worker has a task"
        assert (await find_worker(client, loop.worker)).state == "leaving"
        await collected(stream, spec)
        await await_until(lambda: _is(loop.may_leave()), "the worker to finish its task")
        with pytest.raises(Conflict, match="leaving"):
            await client.operations.order_worker(loop.worker, "resume")


async def test_orders_to_unknown_workers_are_refused(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        with pytest.raises(NotFound):
            await client.operations.order_worker("talker@nowhere:1:a", "drain")
        with pytest.raises(Conflict, match="gateway"):
            await client.operations.order_worker(client.id, "drain")
        loop = fleet.loops[0]
        await asyncio.to_thread(fleet.kill, loop)
        with pytest.raises(Conflict, match="gone"):
            await client.operations.order_worker(loop.worker, "stop")


async def test_workers_are_listed_by_role_before_gateways(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        await answer(client, fake_spec(fleet))
        views = await client.telemetry.workers(with_gone=True)
    roles = [view.role for view in views]
    assert roles == ["code2wav", "talker", "thinker", ""]
    assert all(view.state == "ready" and view.lease_left_s > 0 for view in views)


async def _is(value: bool) -> bool:
    return value
