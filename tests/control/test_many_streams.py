"""With many streams, a leader or gateway renews its lease during long reads, and acts only on the
current state.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import redis
import redis.asyncio

from fleet.conductor.driver import Driver
from fleet.conductor.driver import loop as driver_loop
from fleet.conductor.driver.snapshot import lost_grants, read_live, read_request
from fleet.conductor.invariants import violations
from fleet.conductor.state import RequestRecord, TaskState
from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.connect import Reply, connect, entry_order, run, text
from fleet.control.stream import ClientStream
from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from tests.control_plane import commands_run
from tests.harness import answer, collected, fake_spec, fake_spec_of, open_fleet
from tests.support import await_until

GATEWAY, HOUR_US = WorkerId("gateway@test"), 3_600_000_000
NUM_LIVE, LEASE_S = 6, 60


@dataclass(slots=True)
class SlowReads:
    """Replacement for reads of requests, each of which takes as long as the lead lasts by the
    driver's clock; `then` is called during each read.
    """

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


def test_leader_ignores_observations_of_an_earlier_term(
    client: redis.Redis, driver: Driver
) -> None:
    """A new leader ignores what it observed in an earlier term: after an hour on standby, these
    observations of workers are stale.
    """
    live = read_live(client)
    first = driver.config.graph_declaration().stages[0].name
    driver.took_over_at = time.monotonic() - 3600
    driver.turn()
    for at in driver.granted_at:
        driver.granted_at[at] -= driver.config.lease.claim_timeout_s + 1
    driver.next_watch = 0.0
    driver.turn()
    assert [client.hget(keys.task(request, first), "state") for request in live] == [
        b"granted"
    ] * NUM_LIVE


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
    assert [client.hget(keys.task(request, first), "state") for request in live] == [
        b"granted"
    ] * NUM_LIVE


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
        smembers = client._redis.smembers  # pyright: ignore[reportPrivateUsage]

        async def held_then_delivered(name: str) -> object:
            members = await smembers(name)
            await collected(stream, spec)
            return members

        client._redis.smembers = held_then_delivered  # pyright: ignore
        for _ in range(2):
            await client.requests._release_unread()  # pyright: ignore[reportPrivateUsage]
        view = await client.telemetry.trace(spec.id)
        assert view is not None
        assert view.state == "finished" and "lost" not in {event.what for event in view.events}


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


def age_grants(client: redis.Redis, driver: Driver) -> None:
    """Make every grant overdue, for roles whose workers are still starting."""
    driver.took_over_at, driver.next_watch = time.monotonic() - 3600, 0.0
    for at in driver.granted_at:
        driver.granted_at[at] -= 3600
        run(client, scripts.announce_start(RoleName(at[1]), "test:9", 60_000_000))


def test_leader_renews_its_lease_between_slices_of_overdue_grants(
    client: redis.Redis, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        driver.turn()
    scripts_run: list[str] = []
    slices: list[list[tuple[RequestId, StageName]]] = []
    left_s: list[int] = []

    def record_run(to: redis.Redis, call: scripts.Call) -> Reply:
        scripts_run.append(call.script)
        return run(to, call)

    def read_grants_slowly(
        _: object, grants: Sequence[tuple[RequestId, StageName]]
    ) -> set[tuple[RequestId, StageName]]:
        slices.append(list(grants))
        left_s.append(client.ttl(keys.CONDUCTOR))
        client.expire(keys.CONDUCTOR, LEASE_S // 2)
        return set()

    monkeypatch.setattr(driver_loop, "run", record_run)
    monkeypatch.setattr(driver_loop, "lost_grants", read_grants_slowly)
    monkeypatch.setattr(driver_loop, "WATCH_SLICE", 4)
    age_grants(client, driver)
    overdue = list(driver.granted_at)
    for _ in range(-(-len(overdue) // 4)):
        driver.turn()
    assert [grant for grants in slices for grant in grants] == overdue, "each grant is handled once"
    assert all(len(grants) <= 4 for grants in slices) and scripts_run.count("availability") == len(
        slices
    )
    assert all(left > LEASE_S // 2 for left in left_s), "the lead is renewed before each slice"


def test_leader_reads_each_role_once_for_many_overdue_grants(
    client: redis.Redis, driver: Driver
) -> None:
    for stage in driver.config.graph_declaration().stages:
        run(
            client,
            scripts.register(
                WorkerId(f"{stage.name}@test:1:a"), stage.name, HOUR_US, {"kind": "test"}
            ),
        )
    for _ in range(2):
        driver.turn()
    age_grants(client, driver)
    client.config_resetstat()
    driver.turn()
    reads = sum(n for name, n in commands_run(client).items() if name.startswith("xinfo"))
    assert reads == len({stage for _, stage in driver.granted_at})


def test_waiting_grant_is_lost_once_it_left_its_queue(client: redis.Redis, driver: Driver) -> None:
    """A waiting grant counts as lost only once it has left its queue; a grant that no worker has
    read is not lost, since the role may be busy.
    """
    role = driver.config.roles()[0]
    worker = WorkerId(f"{role.name}@test:1:a")
    run(client, scripts.register(worker, role.name, HOUR_US, {"kind": "test"}))
    for _ in range(2):
        driver.turn()
    waiting = sorted(
        (grant for grant in driver.granted_at if grant[1] == role.stage),
        key=lambda grant: entry_of(client, grant),
    )
    client.xreadgroup(keys.GROUP, worker, {keys.role(role.name): ">"}, count=2, noack=True)
    read = {grant for grant in waiting if entry_of(client, grant) <= entry_of(client, waiting[1])}
    assert lost_grants(client, waiting) == read and 0 < len(read) < len(waiting)


def entry_of(client: redis.Redis, grant: tuple[RequestId, StageName]) -> tuple[int, int]:
    return entry_order(text(client.hget(keys.task(*grant), "entry")))


def test_invariants_are_checked_of_changed_requests_only(
    client: redis.Redis, driver: Driver
) -> None:
    driver.turn()
    first, *_, last = driver.state.requests.values()
    stage = next(iter(first.tasks))
    broken = replace(
        first,
        tasks={
            **first.tasks,
            stage: replace(first.tasks[stage], state=TaskState.RUNNING, owner=None),
        },
    )
    changed = driver.state.with_request(broken)
    assert len(violations(changed, driver.state)) == len(violations(changed)) == 1
    assert violations(changed.with_request(replace(last, ending=True)), changed) == []
