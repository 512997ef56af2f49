"""A redelivered task is granted again only if it is unchanged since it was read; no death is
counted for it.
"""

import asyncio

import numpy as np
import pytest

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import text
from fleet.core.errors import Conflict, NotFound
from fleet.core.events import TaskLost
from fleet.core.ids import CLIENT, Epoch, RequestId, StageName
from tests.control_plane import REQUEST, ROLE, STAGE, WORKER, Control
from tests.harness import answer, collected, fake_spec, open_fleet
from tests.support import stream_entries


def redeliver(
    control: Control, epoch: int = 0, request: RequestId = REQUEST, stage: StageName = STAGE
) -> str:
    return control.run(scripts.redeliver(request, stage, Epoch(epoch)))


def notices(control: Control) -> list[dict[bytes, bytes]]:
    return [
        fields
        for _, fields in stream_entries(control.client, keys.inbox(WORKER))
        if fields[b"k"] == b"y"
    ]


def test_redeliver_revokes_a_running_task_and_notifies_its_owner(control: Control) -> None:
    epoch = control.own()
    assert control.append(epoch) == "ok"
    assert redeliver(control, epoch) == "ok"
    assert control.append(epoch, 1) == "stale", "the old owner writes no more"
    task = control.task()
    assert (task["state"], task["owner"], task.get("deaths", "0")) == ("granted", "", "0")
    assert control.client.scard(keys.worker_tasks(WORKER)) == 0
    (notice,) = notices(control)
    assert epoch < int(notice[b"e"]) < control.epoch()
    (lost,) = control.events_of(TaskLost)
    assert lost.deaths == 0 and not lost.alone
    again = control.epoch()
    assert control.claim(again) == "ok" and control.append(again, 1) == "ok"


def test_redeliver_replaces_a_grant_in_the_queue(control: Control) -> None:
    old = control.epoch()
    assert redeliver(control, old) == "ok"
    assert (
        control.client.xlen(keys.role(ROLE)) == 1
        and control.claim(old) == "stale"
        and notices(control) == []
    )
    assert control.claim(control.epoch()) == "ok"


def test_redeliver_at_a_stale_epoch_is_refused(control: Control) -> None:
    old = control.own()
    control.kill()
    assert redeliver(control, old) == "stale"
    control.register(WORKER)
    epoch = control.own()
    assert control.append(epoch, finish=True) == "ok"
    assert redeliver(control, epoch) == "finished"
    assert redeliver(control, stage=StageName("none")) == "no_task"
    control.abort()
    assert redeliver(control) == "ended"
    assert redeliver(control, request=RequestId("req-2")) == "unknown"
    assert control.client.exists(keys.request(RequestId("req-2"))) == 0
    assert not any(
        "revoked" in text(line) for line in control.client.lrange(keys.trace(REQUEST), 0, -1)
    )  # pyright: ignore[reportGeneralTypeIssues]


async def redeliver_twice(client: FleetClient, request: RequestId, stage: StageName) -> None:
    """Redeliver the stage's task; a second call with the same epoch is refused."""
    trace = await client.telemetry.trace(request)
    assert trace is not None
    seen = next(task for task in trace.tasks if task.stage == stage)
    if seen.state == "running":
        await client.operations.redeliver(request, stage, seen.epoch)
        with pytest.raises(Conflict, match=r"granted again|no worker has it"):
            await client.operations.redeliver(request, stage, seen.epoch)


async def test_answer_continues_after_each_task_is_redelivered(redis_url: str) -> None:
    """Each stage is redelivered once while it runs; with one worker per role, the same worker
    receives it again.
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
