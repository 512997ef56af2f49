"""Views of queues and capacity for operators and admission: grants that wait for a role, and
workers that count for the role.
"""

from collections.abc import AsyncIterator
from typing import cast

import pytest
import redis

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import first_text, run, text
from fleet.core.errors import NoWorker
from fleet.core.ids import RequestId, RoleName, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.telemetry.views import RoleView
from tests.control_plane import Control
from tests.harness import gateway_at

CONFIG = load_config(None, ("engine=fake", "device=cpu"))
GRAPH = CONFIG.graph_declaration()
STAGES = [stage.name for stage in GRAPH.stages]
STAGE, ROLE = STAGES[0], RoleName(STAGES[0])
LEASE_US, CAPACITY = 60_000_000, 4


class QueueBench:
    """A gateway and a registered worker for each stage, without processes."""

    def __init__(self, client: redis.Redis, gateway: FleetClient) -> None:
        self.client, self.gateway = client, gateway
        self.workers = {stage: self.join(RoleName(stage), 1) for stage in STAGES}

    def join(self, role: RoleName, number: int) -> WorkerId:
        worker = WorkerId(f"{role}@test:{number}:a")
        fields: dict[str, str | bytes] = {
            "kind": "worker",
            "pid": str(number),
            "capacity": str(CAPACITY),
        }
        assert self.call_script(scripts.register(worker, role, LEASE_US, fields)) == "ok"
        return worker

    def call_script(self, call: scripts.Call) -> str:
        return first_text(run(self.client, call))

    async def submit(self) -> RequestId:
        spec = RequestSpec(
            id=new_request_id(), graph=GRAPH.name, prompt_ids=(1,), outputs=tuple(GRAPH.media)
        )
        await self.gateway.requests.submit(spec, None)
        return spec.id

    def read_one(self) -> str:
        """Deliver the next grant to the worker as its loop would read it; return the stream entry's
        id.
        """
        reply = self.client.xreadgroup(
            keys.GROUP, self.workers[STAGE], {keys.role(ROLE): ">"}, count=1, noack=True
        )
        return text(cast("list[tuple[bytes, list[tuple[bytes, object]]]]", reply)[0][1][0][0])

    async def role(self) -> RoleView:
        return next(view for view in await self.gateway.telemetry.roles() if view.role == ROLE)


@pytest.fixture
async def bench(redis_url: str, client: redis.Redis) -> AsyncIterator[QueueBench]:
    async with gateway_at(redis_url, CONFIG) as gateway:
        yield QueueBench(client, gateway)


async def test_grant_is_queued_until_it_is_claimed(bench: QueueBench) -> None:
    assert [view.role for view in await bench.gateway.telemetry.roles()] == STAGES
    first, _ = await bench.submit(), await bench.submit()
    waiting = await bench.role()
    assert (waiting.queue_depth, waiting.lag) == (2, 2) and 0 <= waiting.oldest_s < 10
    entry = bench.read_one()
    assert ((await bench.role()).queue_depth, (await bench.role()).lag) == (2, 1)
    assert (
        bench.call_script(
            scripts.claim(
                bench.workers[STAGE],
                ROLE,
                entry,
                first,
                STAGE,
                Control(bench.client).epoch(STAGE, first),
            )
        )
        == "ok"
    )
    assert ((await bench.role()).queue_depth, (await bench.role()).lag) == (1, 1)


async def test_queue_age_is_that_of_the_oldest_grant(bench: QueueBench) -> None:
    seconds, _ = bench.client.time()
    for age_s in (90, 30):
        bench.client.xadd(keys.role(ROLE), {"r": "x"}, id=f"{(seconds - age_s) * 1000}-1")
    assert (await bench.role()).oldest_s == pytest.approx(90, abs=3)
    bench.client.delete(keys.role(ROLE))
    assert (await bench.role()).oldest_s == 0


async def test_ended_request_leaves_the_queue(bench: QueueBench) -> None:
    request = await bench.submit()
    assert (await bench.role()).queue_depth == 1
    await bench.gateway.requests.abort(request)
    assert (await bench.role()).queue_depth == 0


async def test_draining_worker_does_not_count_as_capacity(bench: QueueBench) -> None:
    """A draining worker does not count as capacity: it keeps its lease and finishes its tasks, but
    a request that needs its role is refused with the role's name.
    """
    leaving = bench.workers[STAGE]
    assert ((await bench.role()).workers, (await bench.role()).capacity) == (1, CAPACITY)
    assert bench.call_script(scripts.order(leaving, "drain")) == "ok"
    view = await bench.role()
    assert (view.workers, view.draining, view.capacity) == (0, 1, 0)
    assert bench.call_script(scripts.renew(leaving, LEASE_US, {"running": 1})) == "ok"
    assert await bench.gateway.telemetry.missing_roles() == [STAGE]
    with pytest.raises(NoWorker, match=STAGE):
        await bench.submit()
    assert await bench.gateway.telemetry.num_live() == 0

    bench.join(ROLE, 2)
    view = await bench.role()
    assert (view.workers, view.draining, view.capacity, view.running) == (1, 1, CAPACITY, 1)
    await bench.submit()
