"""The stream `events` is trimmed: a conductor that is further behind reads every live request from
its hashes, and misses nothing.
"""

from collections.abc import Iterator

import pytest
import redis

from fleet.conductor.driver import Driver
from fleet.conductor.driver import loop as driver_loop
from fleet.conductor.state import TaskState
from fleet.conductor.step import MAX_DEATHS
from fleet.config import load_config
from fleet.control import keys
from fleet.control.connect import connect
from fleet.core.ids import CLIENT, RequestId, WorkerId
from tests.control_plane import GATEWAY, OTHER, REQUEST, STAGE, WORKER, Control

SETTINGS = (
    "engine=fake",
    "device=cpu",
    "graph=text",
    "lease.conductor_ttl_s=60",
    "lease.worker_ttl_s=60",
)


@pytest.fixture
def driver(redis_url: str) -> Iterator[Driver]:
    """Driver of a conductor that leads and has read every event; a gateway and a worker are
    registered.
    """
    with connect(redis_url, one_connection=True) as client:
        driver = Driver(load_config(None, SETTINGS), client, WorkerId("conductor@test"))
        driver.turn()
        plane = Control(client, driver.leader)
        plane.register(GATEWAY, "")
        plane.register(WORKER)
        read_all(driver)
        yield driver


@pytest.fixture
def plane(client: redis.Redis, driver: Driver) -> Control:
    return Control(client, driver.leader)


def read_all(driver: Driver) -> None:
    """Run the conductor until it has read every event, including events caused by its own
    commands.
    """
    while driver.client.xread({keys.EVENTS: driver.last_id}, count=1):
        driver.turn()


def trim(plane: Control) -> None:
    """Remove all events except the last one, which belongs to no request, as many later events
    would.
    """
    plane.register(OTHER)
    plane.leave(OTHER)
    plane.client.xtrim(keys.EVENTS, maxlen=1, approximate=False)


def deliver(plane: Control) -> None:
    """Run the granted task to its end, and read its answer."""
    assert plane.claim() == "ok"
    assert plane.append(plane.epoch(), finish=True) == "ok"
    assert plane.acknowledge(delivered=True) == "ok"


def known_state(driver: Driver, request: RequestId = REQUEST) -> TaskState | None:
    """Return the state of the request's task in the conductor's own record."""
    task = driver.state.task(request, STAGE)
    return task.state if task else None


def test_submission_with_a_trimmed_event_is_followed(plane: Control, driver: Driver) -> None:
    assert plane.submit(REQUEST)[0] == "ok"
    trim(plane)
    read_all(driver)
    assert known_state(driver) is TaskState.GRANTED
    assert (REQUEST, STAGE) in driver.granted_at, "it is noticed if no worker claims it"


def test_end_with_a_trimmed_event_is_known(plane: Control, driver: Driver) -> None:
    assert plane.submit(REQUEST)[0] == "ok"
    read_all(driver)
    deliver(plane)
    trim(plane)
    read_all(driver)
    assert (
        plane.client.scard(keys.LIVE) == 0 and not driver.state.requests and not driver.granted_at
    )


def test_death_alone_with_a_trimmed_event_fails_the_request(plane: Control, driver: Driver) -> None:
    assert plane.submit(REQUEST)[0] == "ok"
    read_all(driver)
    for _ in range(MAX_DEATHS + 1):
        assert plane.claim() == "ok"
        plane.leave(died=True)
        plane.register(WORKER)
    trim(plane)
    read_all(driver)
    assert (plane.client.scard(keys.LIVE), plane.client.xlen(keys.DEAD)) == (0, 1)


def test_leader_that_reads_slowly_notices_trimmed_events(
    plane: Control, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader notices trimmed events although it reads slowly: it reads the first of several
    events, then the rest is trimmed.
    """
    requests = [RequestId(f"req-{number}") for number in range(3)]
    assert [plane.submit(request)[0] for request in requests] == ["ok"] * 3
    monkeypatch.setattr(driver_loop, "BATCH", 1)
    driver.turn()
    trim(plane)
    monkeypatch.undo()
    read_all(driver)
    assert [known_state(driver, request) for request in requests] == [TaskState.GRANTED] * 3


def test_complete_events_are_read_without_the_hashes(
    plane: Control, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only events are trimmed that the conductor has read, it does not read the hashes."""

    def refuse(_client: redis.Redis) -> list[RequestId]:
        raise AssertionError("the live requests are read again")

    plane.client.xtrim(keys.EVENTS, maxlen=1, approximate=False)
    monkeypatch.setattr(driver_loop, "read_live", refuse)
    assert plane.submit(REQUEST)[0] == "ok"
    read_all(driver)
    assert known_state(driver) is TaskState.GRANTED


def test_wait_for_a_gateway_does_not_begin_again_after_trimmed_events(
    plane: Control, driver: Driver
) -> None:
    assert plane.submit(REQUEST)[0] == "ok"
    plane.leave(GATEWAY)
    read_all(driver)
    since, epoch = driver.orphans[REQUEST]
    driver.orphans[REQUEST] = (since - 10, epoch)
    trim(plane)
    driver.turn()
    assert driver.orphans[REQUEST] == (since - 10, plane.epoch(CLIENT))
