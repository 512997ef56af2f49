"""With many streams, a leader or gateway keeps its lease during long reads and acts only on current state."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest
import redis
import redis.asyncio

from fleet.conductor.driver import Driver
from fleet.conductor.driver import loop as driver_loop
from fleet.conductor.driver.snapshot import read_live, read_request
from fleet.conductor.state import RequestRecord
from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.connect import Reply, connect, run, text
from fleet.control.stream import ClientStream
from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, WorkerId
from tests.harness import answer, collected, fake_spec, fake_spec_of, open_fleet
from tests.support import await_until, wait_until

GATEWAY, HOUR_US = WorkerId("gateway@test"), 3_600_000_000
NUM_LIVE, LEASE_S = 6, 60


@dataclass(slots=True)
class SlowReads:
    """Reads of requests that each take as long as the lead lasts, by the driver's clock; `then` is called at each."""

    driver: Driver
    then: Callable[[int], None]
    seen: list[RequestId] = field(default_factory=list[RequestId])

    def __call__(self, client: redis.Redis, request: RequestId) -> RequestRecord | None:
        self.seen.append(request)
        self.driver.led_at -= self.driver.config.lease.conductor_ttl_s
        self.then(len(self.seen))
        return read_request(client, request)


@pytest.fixture
def driver(redis_url: str, client: redis.Redis) -> Iterator[Driver]:
    """A driver that does not lead yet; `NUM_LIVE` requests are live."""
    config = load_config(None, ("engine=fake", "device=cpu", f"lease.conductor_ttl_s={LEASE_S}"))
    graph = config.graph_declaration()
    run(client, scripts.register(GATEWAY, "", HOUR_US, {"kind": "gateway"}))
    specs = [fake_spec_of(config) for _ in range(NUM_LIVE)]
    for spec in specs:
        edges = [edge.name for edge in graph.edges_for(spec.outputs)]
        stages = graph.stages_for(spec.outputs)
        run(client, scripts.submit(spec, None, bound=NUM_LIVE, stages=stages, edges=edges, gateway=GATEWAY))
    with connect(redis_url) as own_client:
        yield Driver(config, own_client, WorkerId("conductor@test"))


def test_leader_ignores_observations_of_an_earlier_term(client: redis.Redis, driver: Driver) -> None:
    """A conductor that was on standby for an hour has no observations of the workers since."""
    live = read_live(client)
    first = driver.config.graph_declaration().stages[0].name
    driver.took_over_at = time.monotonic() - 3600
    driver.turn()
    for at in driver.granted_at:
        driver.granted_at[at] -= driver.config.lease.claim_timeout_s + 1
    driver.next_watch = 0.0
    driver.turn()
    assert [client.hget(keys.task(request, first), "state") for request in live] == [b"granted"] * NUM_LIVE


def test_new_leader_keeps_its_lease_while_it_reads_many_requests(
    client: redis.Redis, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = read_live(client)
    left_s: list[int] = []

    def shorten_lead(_read: int) -> None:
        left_s.append(client.ttl(keys.CONDUCTOR))
        client.expire(keys.CONDUCTOR, LEASE_S // 2)

    reads = SlowReads(driver, shorten_lead)
    monkeypatch.setattr(driver_loop, "read_request", reads)
    driver.turn()
    assert reads.seen == live, "each request is read once"
    assert all(left > LEASE_S // 2 for left in left_s), "the lead is renewed before each read"
    first = driver.config.graph_declaration().stages[0].name
    assert [client.hget(keys.task(request, first), "state") for request in live] == [b"granted"] * NUM_LIVE


def test_leader_that_loses_its_lease_while_reading_sends_no_commands(
    client: redis.Redis, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = read_live(client)

    def lose(read: int) -> None:
        if read == 2:
            client.set(keys.CONDUCTOR, "another|1")

    reads = SlowReads(driver, lose)
    monkeypatch.setattr(driver_loop, "read_request", reads)
    driver.turn()
    assert reads.seen == live[:2]
    assert driver.leader == ""


async def test_answer_that_ends_during_reconciliation_is_not_aborted(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)
        stream = await client.requests.submit(spec, None)

        async def ready() -> bool:
            view = await client.telemetry.trace(spec.id)
            return view is not None and all(edge.produced for edge in view.edges)

        await await_until(ready, "every edge to begin")
        fleet.driver.stopping = True
        wait_until(lambda: not fleet.threads[0].is_alive(), "the conductor to stop, so that the request is not ended")
        smembers = client._redis.smembers  # pyright: ignore[reportPrivateUsage]

        async def held_then_delivered(name: str) -> object:
            members = await smembers(name)
            await collected(stream, spec)
            return members

        client._redis.smembers = held_then_delivered  # pyright: ignore
        for _ in range(2):
            await client.requests._detach_unread()  # pyright: ignore[reportPrivateUsage]
        view = await client.telemetry.trace(spec.id)
        assert view is not None
        assert view.state == "running"


def test_stream_has_moved_once_each_open_edge_received_a_chunk() -> None:
    config = load_config(None, ("engine=fake", "device=cpu"))
    spec = fake_spec_of(config)
    unused = cast("redis.asyncio.Redis", None)
    stream = ClientStream(spec, None, config, unused)

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


def test_leader_reads_role_availability_once_for_many_overdue_grants(
    client: redis.Redis, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        driver.turn()
    scripts_run: list[str] = []
    left_s: list[int] = []

    def record_run(to: redis.Redis, call: scripts.Call) -> Reply:
        scripts_run.append(call.script)
        return run(to, call)

    def read_owner_slowly(*_: object) -> bool:
        left_s.append(client.ttl(keys.CONDUCTOR))
        driver.led_at -= LEASE_S
        client.expire(keys.CONDUCTOR, LEASE_S // 2)
        return False

    monkeypatch.setattr(driver_loop, "run", record_run)
    monkeypatch.setattr(driver_loop, "is_grant_lost", read_owner_slowly)
    driver.took_over_at, driver.next_watch = time.monotonic() - 3600, 0.0
    for at in driver.granted_at:
        driver.granted_at[at] -= 3600
        run(client, scripts.announce_start(RoleName(at[1]), "test:9", 60_000_000))
    driver.turn()
    assert scripts_run.count("availability") == 1 and len(left_s) == len(driver.granted_at) >= NUM_LIVE
    assert all(left > LEASE_S // 2 for left in left_s), "the lead is renewed before each read"


def test_admission_reads_few_workers_of_a_large_fleet(client: redis.Redis, driver: Driver) -> None:
    for role in ("ears", "lm"):
        for number in range(100):
            run(client, scripts.register(WorkerId(f"{role}@test:{number}:a"), role, HOUR_US, {"kind": "test"}))
    run(client, scripts.renew(WorkerId("ears@test:1:a"), HOUR_US, {}))
    spec, roles = fake_spec_of(driver.config), [RoleName("ears"), RoleName("lm")]
    client.config_resetstat()
    call = scripts.submit(spec, None, bound=NUM_LIVE + 1, stages=[], edges=[], gateway=GATEWAY, roles=roles, grace_us=0)
    assert text(cast("list[bytes]", run(client, call))[0]) == "ok"
    statistics = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    assert statistics["cmdstat_hmget"]["calls"] < 10
