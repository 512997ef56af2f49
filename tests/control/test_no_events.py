"""The stream `events` is a trace: whatever is trimmed from it, or lost with a leader, no request
depends on it.
"""

from collections.abc import Iterator

import pytest
import redis

from fleet.conductor.driver import Driver
from fleet.config import load_config
from fleet.control import keys
from fleet.control.connect import connect, texts
from fleet.core.ids import WorkerId
from tests.control_plane import GATEWAY, MAX_DEATHS, REQUEST, ROLE, WORKER, Control

SETTINGS = ("engine=fake", "device=cpu", "graph=text", "lease.conductor_ttl_s=60")


@pytest.fixture
def driver(redis_url: str) -> Iterator[Driver]:
    """A conductor that leads."""
    with connect(redis_url, one_connection=True) as client:
        driver = Driver(load_config(None, SETTINGS), client, WorkerId("conductor@test"))
        driver.turn()
        yield driver


@pytest.fixture
def plane(client: redis.Redis, driver: Driver) -> Control:
    plane = Control(client, driver.leader)
    plane.register(GATEWAY, "")
    plane.register(WORKER)
    assert plane.submit(REQUEST)[0] == "ok"
    return plane


def watch(plane: Control, driver: Driver) -> None:
    """Delete all events, make every wait overdue, and let the conductor watch."""
    plane.client.delete(keys.EVENTS)
    for waits in (keys.GRANTED, keys.WITHOUT_GATEWAY):
        for member in texts(plane.client.zrange(waits, 0, -1)):
            plane.client.zadd(waits, {member: 1})
    driver.next_watch = 0.0
    driver.turn()


def test_death_alone_fails_the_request(plane: Control, driver: Driver) -> None:
    for _ in range(MAX_DEATHS + 1):
        assert plane.claim() == "ok"
        plane.leave(died=True)
        plane.register(WORKER)
        watch(plane, driver)
    assert (plane.client.scard(keys.LIVE), plane.client.xlen(keys.DEAD)) == (0, 1)


def test_lost_grant_is_repeated(plane: Control, driver: Driver) -> None:
    granted = plane.epoch()
    plane.client.xreadgroup(keys.GROUP, WORKER, {keys.role(ROLE): ">"}, noack=True)
    watch(plane, driver)
    assert plane.epoch() > granted and plane.claim() == "ok"


def test_request_without_a_gateway_is_aborted(plane: Control, driver: Driver) -> None:
    plane.leave(GATEWAY)
    assert plane.client.zcard(keys.WITHOUT_GATEWAY) == 1
    watch(plane, driver)
    assert plane.client.scard(keys.LIVE) == 0
    assert plane.client.hget(keys.request(REQUEST), "state") == b"aborted"


def test_request_that_another_gateway_reads_is_kept(plane: Control, driver: Driver) -> None:
    plane.leave(GATEWAY)
    plane.register(GATEWAY, "")
    assert plane.attach(GATEWAY) == "ok"
    assert plane.client.exists(keys.WITHOUT_GATEWAY) == 0
    watch(plane, driver)
    assert plane.client.scard(keys.LIVE) == 1
