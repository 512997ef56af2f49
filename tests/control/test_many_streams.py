"""With many streams, a leader or gateway renews its lease during long reads, and acts only on the
current state.
"""

from collections.abc import Iterator
from typing import cast

import pytest
import redis
import redis.asyncio

from fleet.conductor.driver import Driver
from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.connect import connect, run, text
from fleet.control.endings import EndingsOwed
from fleet.control.membership import Membership
from fleet.control.stream import ClientStream
from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from tests.control_plane import commands_run
from tests.harness import answer, collected, fake_spec, fake_spec_of, open_fleet
from tests.support import await_until

GATEWAY, HOUR_US = WorkerId("gateway@test"), 3_600_000_000
NUM_LIVE, LEASE_S = 6, 60


def live(client: redis.Redis) -> list[RequestId]:
    """Return every live request, the oldest first."""
    return sorted(RequestId(text(each)) for each in cast("set[bytes]", client.smembers(keys.LIVE)))


@pytest.fixture
def driver(redis_url: str, client: redis.Redis) -> Iterator[Driver]:
    """A conductor's driver that does not lead yet, and `NUM_LIVE` live requests."""
    config = load_config(None, ("engine=fake", "device=cpu", f"lease.conductor_ttl_s={LEASE_S}"))
    graph = config.graph_declaration()
    run(client, scripts.register(GATEWAY, "", HOUR_US, {"kind": "gateway"}))
    specs = [fake_spec_of(config) for _ in range(NUM_LIVE)]
    for spec in specs:
        edges = [edge.name for edge in graph.edges_for(spec.outputs)]
        stages = graph.stages_for(spec.outputs)
        run(
            client,
            scripts.submit(spec, None, bound=NUM_LIVE, stages=stages, edges=edges, gateway=GATEWAY),
        )
    with connect(redis_url) as own_client:
        yield Driver(config, own_client, WorkerId("conductor@test"))


def test_new_leader_lets_every_wait_begin_again(client: redis.Redis, driver: Driver) -> None:
    """A new leader has observed no worker and no gateway before: what seems overdue may only have
    had no conductor.
    """
    requests = live(client)
    stages = driver.config.graph_declaration().stages
    for request in requests:
        client.zadd(keys.WITHOUT_GATEWAY, {request: 1})
        client.zadd(keys.GRANTED, {f"{request}|{stage.name}": 1 for stage in stages}, xx=True)
    for _ in range(2):
        driver.next_watch = 0.0
        driver.turn()
    assert live(client) == requests
    assert client.zcard(keys.GRANTED) == NUM_LIVE * len(stages)
    assert client.zcount(keys.GRANTED, "-inf", 1) == 0


async def test_answer_that_ends_during_reconciliation_is_not_aborted(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)
        stream = await client.requests.submit(spec, None)

        async def ready() -> bool:
            view = await client.telemetry.trace(spec.id)
            return view is not None and all(edge.produced for edge in view.edges)

        await await_until(ready, "every edge to begin")
        smembers = client._redis.smembers  # pyright: ignore[reportPrivateUsage]

        async def held_then_delivered(name: str) -> object:
            members = await smembers(name)
            await collected(stream, spec)
            return members

        client._redis.smembers = held_then_delivered  # pyright: ignore
        for _ in range(2):
            await client.requests.recovery.release_unread()
        view = await client.telemetry.trace(spec.id)
        assert view is not None
        assert view.state == "finished" and "lost" not in {event.what for event in view.events}


def test_stream_has_moved_once_each_open_edge_received_a_chunk() -> None:
    config = load_config(None, ("engine=fake", "device=cpu"))
    spec = fake_spec_of(config)
    unused = cast("redis.asyncio.Redis", None)
    endings = EndingsOwed(unused, Membership(unused, unused, config))
    stream = ClientStream(spec, None, config, unused, endings)

    def put(edge: EdgeName, index: int) -> None:
        stream.put(Chunk(request=spec.id, edge=edge, index=index, epoch=Epoch(1)))

    one, other = spec.outputs
    assert not stream.moved(), "no chunk has arrived"
    put(one, 0)
    assert not stream.moved(), "the other edge has no chunk"
    put(one, 1)
    put(other, 0)
    assert stream.moved()
    assert not stream.moved(), "no chunk arrived since"
    put(one, 2)
    put(other, 2)
    assert not stream.moved(), "a chunk after a gap does not count"
    put(other, 1)
    put(one, 3)
    assert stream.moved()


def take_delivery(client: redis.Redis, role: RoleName, count: int) -> set[RequestId]:
    """Read the oldest grants of a role as a worker does, which then claims none of them; return
    their requests.
    """
    worker = WorkerId(f"{role}@test:1:a")
    run(client, scripts.register(worker, role, HOUR_US, {"kind": "test"}))
    read = client.xreadgroup(keys.GROUP, worker, {keys.role(role): ">"}, count=count, noack=True)
    ((_, entries),) = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", read)
    return {RequestId(text(fields[b"r"])) for _, fields in entries}


def epochs(client: redis.Redis, stage: StageName) -> dict[RequestId, str]:
    return {
        request: text(client.hget(keys.task(request, stage), "epoch")) for request in live(client)
    }


def test_many_overdue_grants_are_decided_in_slices_with_one_look_at_each_role(
    client: redis.Redis, driver: Driver
) -> None:
    """A grant that waits in its queue is not lost, since the role may be busy; a grant that a
    worker has read is made again. However many are overdue, each role is read once for a slice.
    """
    first, second = (role.name for role in driver.config.roles()[:2])
    read = take_delivery(client, first, 2)
    before = {stage: epochs(client, StageName(stage)) for stage in (first, second)}
    driver.turn()
    client.config_resetstat()
    assert text(run(client, scripts.overdue(driver.leader, 0, None))) == "ok"
    reads = sum(n for name, n in commands_run(client).items() if name.startswith("xinfo"))
    assert reads == len(driver.config.graph_declaration().stages)
    after = {stage: epochs(client, StageName(stage)) for stage in (first, second)}
    changed = {
        request for request in live(client) if before[first][request] != after[first][request]
    }
    assert changed == read and len(read) == 2 and before[second] == after[second]


def test_request_of_a_role_without_workers_fails_and_names_the_role(
    client: redis.Redis, driver: Driver
) -> None:
    role = driver.config.roles()[0]
    driver.turn()
    for other in driver.config.roles()[1:]:
        run(client, scripts.announce_start(other.name, "test:9", 60_000_000))
    assert text(run(client, scripts.overdue(driver.leader, 0, None))) == "ok"
    assert len(live(client)) == NUM_LIVE, "absent workers were not observed for long enough"
    requests = live(client)
    assert text(run(client, scripts.overdue(driver.leader, 0, 0))) == "ok"
    assert live(client) == []
    message = text(client.hget(keys.request(requests[0]), "message"))
    assert f"`fleet worker {role.name}`" in message
