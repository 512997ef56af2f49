"""Operator commands to a worker (drain, resume, stop) or about a task (redeliver) take effect
immediately.
"""

import asyncio
from typing import cast

import numpy as np
import pytest

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import text
from fleet.core.errors import Conflict, NotFound
from fleet.core.events import TaskLost
from fleet.core.ids import CLIENT, Epoch, RequestId, StageName, WorkerId
from fleet.telemetry.views import WorkerOrder, WorkerView
from tests.control_plane import GATEWAY, OTHER, REQUEST, WORKER, Control
from tests.harness import answer, collected, fake_spec, open_fleet
from tests.support import await_until


def state(control: Control, worker: WorkerId = WORKER) -> tuple[str, str]:
    """Return the fields `draining` and `leaving` of the worker."""
    key = keys.worker(worker)
    return text(control.client.hget(key, "draining")), text(control.client.hget(key, "leaving"))


def notices(control: Control) -> list[str]:
    return [text(notice[b"o"]) for notice in control.inbox() if notice[b"k"] == b"o"]


def test_orders_apply_immediately_and_may_be_repeated(control: Control) -> None:
    """Commands take effect immediately and may be repeated. A leaving worker cannot be resumed."""
    states: dict[WorkerOrder, tuple[str, str]] = {
        "drain": ("1", ""),
        "resume": ("", ""),
        "stop": ("1", "1"),
    }
    for order, after in states.items():
        assert [control.order(order), control.order(order)] == ["ok", "ok"]
        assert state(control) == after
    assert [control.order("drain"), control.order("resume")] == ["ok", "leaving"]
    assert state(control) == ("1", "1")
    assert notices(control) == ["drain", "drain", "resume", "resume", "stop"]


def test_leaving_worker_refuses_resume(control: Control) -> None:
    assert control.drain() == "ok"
    assert control.order("resume") == "leaving" and notices(control) == []


def test_drain_promotes_a_standby_worker_once(control: Control) -> None:
    assert control.register(OTHER, standby=1) == "standby"
    for _ in range(2):
        control.order("drain")
    assert control.client.hget(keys.worker(OTHER), "standby") == b""
    assert len(control.inbox(OTHER)) == 1


def test_gateways_add_metrics_to_one_step_that_expires(control: Control) -> None:
    call = scripts.record_metrics(GATEWAY, {"underruns": 2}, {"running:lm": 5})
    assert [control.run(call), control.run(call)] == ["ok", "ok"]
    steps = list(control.client.scan_iter(keys.PREFIX + "series:*"))
    series = [cast("dict[bytes, bytes]", control.client.hgetall(key)) for key in steps]
    assert sum(int(fields.get(b"underruns", 0)) for fields in series) == 4
    assert {fields.get(b"running:lm", b"5") for fields in series} == {b"5"}
    assert all(0 < control.client.ttl(key) <= 3700 for key in steps)


def revocations(control: Control) -> list[dict[bytes, bytes]]:
    return [notice for notice in control.inbox() if notice[b"k"] == b"y"]


def test_redeliver_revokes_a_running_task_and_notifies_its_owner(control: Control) -> None:
    epoch = control.own()
    assert control.append(epoch) == "ok"
    assert control.redeliver(epoch) == "ok"
    assert control.append(epoch, 1) == "stale", "the old owner writes no more"
    task = control.task()
    assert (task["state"], task["owner"], task.get("deaths", "0")) == ("granted", "", "0")
    assert control.client.scard(keys.worker_tasks(WORKER)) == 0
    (notice,) = revocations(control)
    assert epoch < int(notice[b"e"]) < control.epoch()
    (lost,) = control.events_of(TaskLost)
    assert lost.deaths == 0 and not lost.alone
    again = control.epoch()
    assert control.claim(again) == "ok" and control.append(again, 1) == "ok"


def test_redeliver_replaces_a_grant_in_the_queue(control: Control) -> None:
    old = control.epoch()
    assert control.redeliver(old) == "ok"
    assert len(control.grants()) == 1 and revocations(control) == []
    assert [control.claim(old), control.claim()] == ["stale", "ok"]


def test_redelivery_of_a_finished_or_unknown_task_is_refused(control: Control) -> None:
    epoch = control.own()
    assert control.append(epoch, finish=True) == "ok"
    assert control.redeliver(epoch) == "finished"
    assert control.redeliver(stage=StageName("none")) == "no_task"
    trace = [text(line) for line in control.client.lrange(keys.trace(REQUEST), 0, -1)]
    assert not any("revoked" in line for line in trace)


async def redeliver_twice(client: FleetClient, request: RequestId, stage: StageName) -> None:
    """Redeliver the stage's task; check that a second call with the same epoch is refused."""
    trace = await client.telemetry.trace(request)
    assert trace is not None
    seen = next(task for task in trace.tasks if task.stage == stage)
    if seen.state == "running":
        await client.operations.redeliver(request, stage, seen.epoch)
        with pytest.raises(Conflict, match=r"granted again|no worker has it"):
            await client.operations.redeliver(request, stage, seen.epoch)


async def test_answer_continues_after_each_task_is_redelivered(redis_url: str) -> None:
    """The answer is complete although the task of every stage is redelivered once while it runs.
    The only worker of its role receives the task again.
    """
    async with open_fleet(redis_url, "edges.audio.credits=4") as (fleet, client):
        plain = fake_spec(fleet, num_tokens=60)
        expected = await answer(client, plain)
        spec = fake_spec(fleet, num_tokens=60)
        stream = await client.requests.submit(spec, None)
        begun = await anext(aiter(stream))
        for stage in fleet.config.graph_declaration().stages:
            await redeliver_twice(client, spec.id, stage.name)
        rest = await asyncio.wait_for(collected(stream, spec), 60)
        tensor = next(iter(begun.tensors.values()))
        assert tensor.data is not None
        first = np.frombuffer(tensor.data, tensor.dtype)
        received = {
            edge: np.concatenate([first, part]) if edge == begun.edge else part
            for edge, part in rest.items()
        }
        assert all(np.array_equal(received[edge], expected[edge]) for edge in spec.outputs)
        trace = await client.telemetry.trace(spec.id)
        assert trace is not None and "revoked" in {mark.detail for mark in trace.events}
        assert all(task.deaths == 0 for task in trace.tasks)


async def test_refused_redelivery_names_its_cause(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet)
        stage = fleet.config.graph_declaration().stages[0].name
        with pytest.raises(NotFound, match="no request"):
            await client.operations.redeliver(spec.id, stage, Epoch(0))
        await answer(client, spec)
        with pytest.raises(NotFound, match="no task"):
            await client.operations.redeliver(spec.id, StageName(CLIENT), Epoch(0))
        with pytest.raises(Conflict, match="ended|finished"):
            await client.operations.redeliver(spec.id, stage, Epoch(0))


TALKER = "talker"


async def find_worker(client: FleetClient, worker: str) -> WorkerView:
    return next(
        view for view in await client.telemetry.workers(with_gone=True) if view.id == worker
    )


async def test_drained_worker_finishes_its_tasks_and_claims_no_others(redis_url: str) -> None:
    async with open_fleet(redis_url, "edges.audio.credits=4") as (fleet, client):
        first = next(loop for loop in fleet.loops if loop.stage == TALKER)
        spec = fake_spec(fleet, num_tokens=60)
        stream = await client.requests.submit(spec, None)
        begun = await anext(aiter(stream))
        await asyncio.to_thread(fleet.owner, spec.id, first.stage)
        await client.operations.order_worker(first.worker, "drain")
        await await_until(lambda: _is(first.availability.draining), "the worker to read the order")
        view = await find_worker(client, first.worker)
        assert view.state == "draining" and [task.request for task in view.tasks] == [spec.id]
        other = await asyncio.to_thread(fleet.add_worker, TALKER)
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
            if t.stage == TALKER
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
            and next(t.owner for t in trace.tasks if t.stage == TALKER) == first.worker
        )


async def test_stopped_worker_leaves_after_its_tasks(redis_url: str) -> None:
    async with open_fleet(redis_url, "edges.audio.credits=4") as (fleet, client):
        loop = next(loop for loop in fleet.loops if loop.stage == TALKER)
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
