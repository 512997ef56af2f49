"""Redis's clock may be set: live workers keep their tasks, dead workers are noticed in time, and no
epoch is issued twice.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import redis

from fleet.conductor.driver import Driver
from fleet.config import load_config
from fleet.control import connect as connecting
from fleet.control import keys, scripts
from fleet.control.connect import connect, run, text
from fleet.core.events import TaskLost
from fleet.core.ids import RequestId, WorkerId
from tests.control_plane import GATEWAY, OTHER, REQUEST, ROLE, STAGE, WORKER, Control

LEASE_S, RENEWAL_S, POLL_S, HOUR_S = 1.25, 0.25, 0.25, 3600.0
SETTINGS = (
    "engine=fake",
    "device=cpu",
    "graph=text",
    "lease.conductor_ttl_s=60",
    "lease.claim_timeout_s=0.1",
    "lease.no_worker_timeout_s=1",
)
REDIS_TIME, TEST_TIME = "call('TIME')", "{0, call('GET', 'test:redis_us')}"


@dataclass(slots=True)
class Clocks:
    """The clock of Redis, as scripts read it, and the conductor's clock, which advance together;
    only Redis's clock can be set.
    """

    client: redis.Redis
    now_ms: int = 1_000_000
    redis_us: int = 1_790_000_000_000_000

    def monotonic(self) -> float:
        return self.now_ms / 1000

    def set(self, step_s: float) -> None:
        self.redis_us += int(step_s * 1e6)
        self.client.set("test:redis_us", self.redis_us)

    def advance(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.set(duration_ms / 1000)


@pytest.fixture
def clocks(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    def source(name: str) -> str:
        lua = scripts.source(name)
        assert lua.count(REDIS_TIME) <= 1, "every script reads the clock by one function"
        return lua.replace(REDIS_TIME, TEST_TIME)

    monkeypatch.setattr(connecting, "source", source)
    monkeypatch.setattr(
        connecting,
        "sha",
        lambda name: hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest(),
    )
    clocks = Clocks(client)
    clocks.set(0.0)
    yield clocks
    client.delete("test:redis_us")


class Bench:
    """A conductor, a gateway and two workers, of which one runs the request's task. `alive`:
    workers and gateway that renew their leases.
    """

    def __init__(self, clocks: Clocks, client: redis.Redis) -> None:
        self.clocks, self.client = clocks, client
        self.plane = Control(client, "")
        self.alive = {GATEWAY, WORKER, OTHER}
        for worker in self.alive:
            run(
                client,
                scripts.register(
                    worker, "" if worker == GATEWAY else ROLE, int(LEASE_S * 1e6), {"kind": "test"}
                ),
            )
        assert self.plane.submit(REQUEST)[0] == "ok"
        self.lead("conductor@test")
        self.epoch = self.plane.epoch()
        assert self.plane.claim(self.epoch) == "ok"

    def lead(self, name: str) -> None:
        """Replace the conductor by a new one with this name, which becomes the leader."""
        self.client.delete(keys.CONDUCTOR)
        self.driver = Driver(
            load_config(None, SETTINGS), self.client, WorkerId(name), self.clocks.monotonic
        )
        self.driver.turn()
        self.plane.leader = self.driver.leader

    def pass_time(self, duration_s: float) -> Iterable[float]:
        """Advance both clocks in steps of 50 ms, with lease renewals and conductor polls when due;
        after each step yield the seconds passed since the call.
        """
        for passed_ms in range(50, int(duration_s * 1000) + 1, 50):
            self.clocks.advance(50)
            if self.clocks.now_ms % int(RENEWAL_S * 1000) == 0:
                for worker in self.alive:
                    self.plane.run(scripts.renew(worker, int(LEASE_S * 1e6), {}))
            if self.clocks.now_ms % 200 == 0:
                self.poll()
            yield passed_ms / 1000

    def set_clock(self, step_s: float) -> None:
        """Move Redis's clock by `step_s`; the conductor polls before the workers renew their
        leases.
        """
        self.clocks.set(step_s)
        self.poll()

    def poll(self) -> None:
        self.driver.next_watch = 0.0
        self.driver.turn()

    def live_for(self, duration_s: float) -> None:
        assert list(self.pass_time(duration_s))

    def fenced_after_s(self, worker: WorkerId) -> float:
        """Advance the clocks until the worker is fenced; return the seconds that passed."""
        return next(s for s in self.pass_time(10 * LEASE_S) if worker not in self.listed())

    def listed(self) -> set[WorkerId]:
        return {WorkerId(text(name)) for name in self.client.zrange(keys.WORKERS, 0, -1)}


@pytest.fixture
def bench(clocks: Clocks, redis_url: str) -> Iterator[Bench]:
    with connect(redis_url, one_connection=True) as client:
        hz = str(client.config_get("hz")["hz"])
        client.config_set("hz", 500)  # A read that waits for events ends at the server's next tick.
        yield Bench(clocks, client)
        client.config_set("hz", hz)


@pytest.mark.one_in(3, "steps of the clock")
@pytest.mark.parametrize("step_s", [1.2, 3 * LEASE_S, HOUR_S, -1.2, -HOUR_S])
def test_live_workers_keep_their_tasks_when_the_clock_of_redis_is_set(
    bench: Bench, step_s: float
) -> None:
    bench.live_for(2.15)
    bench.set_clock(step_s)
    bench.live_for(3 * LEASE_S)
    assert bench.listed() == bench.alive
    assert (bench.plane.task()["owner"], bench.plane.epoch()) == (WORKER, bench.epoch)
    assert bench.plane.events_of(TaskLost) == [] and "deaths" not in bench.plane.task()


@pytest.mark.one_in(3, "steps of the clock")
@pytest.mark.parametrize("step_s", [0.0, -1.2, -HOUR_S, HOUR_S])
def test_dead_worker_is_fenced_after_its_lease_when_the_clock_of_redis_is_set(
    bench: Bench, step_s: float
) -> None:
    bench.live_for(2.0)
    bench.alive.remove(WORKER)
    bench.set_clock(step_s)
    assert LEASE_S - RENEWAL_S <= bench.fenced_after_s(WORKER) <= LEASE_S + POLL_S
    assert bench.listed() == bench.alive and bench.plane.task()["state"] == "granted"


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
def test_new_leader_fences_only_the_dead_after_the_clock_of_redis_was_set(
    bench: Bench, step_s: float
) -> None:
    bench.live_for(2.0)
    bench.alive.remove(WORKER)
    bench.set_clock(step_s)
    bench.lead("conductor@next")
    assert LEASE_S <= bench.fenced_after_s(WORKER) <= LEASE_S + POLL_S
    assert bench.listed() == bench.alive


def test_waiting_request_is_not_failed_when_the_clock_of_redis_is_set_forward(bench: Bench) -> None:
    """A waiting request is not failed when Redis's clock jumps forward: its grant is overdue
    because its role is busy, and all leases seem to have lapsed long ago.
    """
    assert bench.plane.submit("req-2")[0] == "ok"
    bench.live_for(2.15)
    bench.set_clock(HOUR_S)
    bench.live_for(3 * LEASE_S)
    assert [
        text(bench.client.hget(keys.request(request), "state"))
        for request in (REQUEST, RequestId("req-2"))
    ] == ["running", "submitted"]


def test_request_of_a_deserted_role_fails_after_the_clock_of_redis_was_set(bench: Bench) -> None:
    assert bench.plane.submit("req-2")[0] == "ok"
    bench.live_for(2.15)
    bench.set_clock(HOUR_S)
    bench.alive -= {WORKER, OTHER}
    bench.live_for(3 * LEASE_S)
    assert bench.client.scard(keys.LIVE) == 0


@pytest.mark.parametrize("step_s", [0.0, -HOUR_S])
def test_epoch_that_redis_lost_is_not_issued_again(bench: Bench, step_s: float) -> None:
    """Redis loses the write that raised an epoch, so that the next epoch starts from the same
    value: it must still differ from the lost one.
    """
    bench.set_clock(step_s)
    bench.plane.leave()
    bench.driver.turn()
    kept = bench.plane.task()
    issued: list[int] = []
    for _ in range(2):
        for field, value in kept.items():
            bench.client.hset(keys.task(REQUEST, STAGE), field, value)
        bench.clocks.advance(1)
        issued.append(bench.plane.grant())
    assert issued[0] != issued[1] and min(issued) > int(kept["epoch"])


def test_lead_of_a_dead_conductor_lapses_after_its_lease_when_the_clock_is_set_back(
    client: redis.Redis,
) -> None:
    """The lead of a dead conductor lapses after its lease even if Redis's clock is set back; times
    to live in Redis follow its clock.
    """
    candidate, lease_ms = WorkerId("conductor@next"), 1500
    assert run(client, scripts.lead(WorkerId("conductor@dead"), "", lease_ms))
    client.pexpire(keys.CONDUCTOR, int(HOUR_S * 1000))
    assert text(run(client, scripts.lead(candidate, "", lease_ms))) == ""
    assert 0 < client.pttl(keys.CONDUCTOR) <= lease_ms
