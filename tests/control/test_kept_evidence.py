"""What operators read hours and days later: the journal by time and kind, the time series of the
last hour, and the records of processes that have ended.
"""

import socket
import subprocess
from typing import Any, cast

import pytest
import redis

from fleet.cli.supervise import fence_process
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect_async
from fleet.control.telemetry.series import SeriesReader
from fleet.core.ids import WorkerId
from fleet.graphs import get_graph
from fleet.telemetry.views import (
    GONE_LISTED_S,
    MAX_GONE_KEPT,
    MAX_GONE_LISTED,
    SERIES_KEPT_S,
    SERIES_STEP_S,
    TaskRef,
)
from tests.control_plane import OTHER, REQUEST, ROLE, STAGE, WORKER, Control

DAY_US = 24 * 3600 * 1_000_000
HELD = (TaskRef(request=REQUEST, stage=STAGE),)


@pytest.fixture
def control(client: redis.Redis) -> Control:
    """A control plane on the Redis server that `gateway_client` reads."""
    return Control(client).begin()


async def test_journal_is_read_by_time_and_kind(
    control: Control, gateway_client: FleetClient
) -> None:
    control.client.delete(keys.JOURNAL)
    for second in range(1, 2501):
        fields = {"at_us": second * 1_000_000, "what": "died" if second % 2 else "joined"}
        control.client.xadd(keys.JOURNAL, cast(Any, fields), id=f"{second * 1000}-0")

    async def seconds(**options: Any) -> list[int]:
        found = await gateway_client.telemetry.journal(**options)
        return [entry.at_us // 1_000_000 for entry in found]

    assert await seconds() == list(range(1501, 2501)), "the newest, oldest first"
    assert await seconds(limit=2) == [2499, 2500]
    assert await seconds(since_us=5_000_000, until_us=7_000_000) == [5, 6, 7]
    assert await seconds(until_us=7_000_000, limit=3) == [5, 6, 7]
    assert await seconds(what=("died",), limit=1100) == list(range(301, 2500, 2))
    assert await seconds(what=("died", "joined"), limit=2500) == list(range(1, 2501))
    assert await seconds(since_us=2_501_000_000) == []


async def test_dead_worker_says_two_days_later_what_it_held(
    control: Control, gateway_client: FleetClient
) -> None:
    control.own()
    control.leave(died=True, cause="SIGKILL")
    key, telemetry = keys.gone(WORKER), gateway_client.telemetry
    gone = [view for view in await telemetry.workers(with_gone=True) if view.gone]
    assert [(view.id, view.held) for view in gone] == [(WORKER, HELD)]
    days_left = control.client.ttl(key) / 86_400
    assert 13.9 < days_left <= 14
    two_days_ago = int(control.client.hget(key, "ended_us") or 0) - 2 * DAY_US
    control.client.expire(key, int((days_left - 2) * 86_400))
    control.client.hset(key, "ended_us", two_days_ago)
    control.client.zadd(keys.GONE, {WORKER: two_days_ago})
    assert not [view for view in await telemetry.workers(with_gone=True) if view.gone]
    view = await telemetry.worker(WORKER)
    assert view is not None and view.gone
    assert (view.state, view.cause, view.held) == ("died", "SIGKILL", HELD)
    assert view.ended_us == two_days_ago
    control.register(OTHER)
    control.leave(OTHER, died=True)
    assert await telemetry.worker(WORKER) is not None, "another end does not remove it"


async def test_record_goes_after_its_days(control: Control, gateway_client: FleetClient) -> None:
    control.leave(died=True)
    long_ago = int(control.client.hget(keys.gone(WORKER), "ended_us") or 0) - 15 * DAY_US
    control.client.zadd(keys.GONE, {WORKER: long_ago})
    control.register(OTHER)
    control.leave(OTHER)
    assert control.client.zrange(keys.GONE, 0, -1) == [OTHER.encode()]
    control.client.expire(keys.gone(WORKER), 0)
    assert await gateway_client.telemetry.worker(WORKER) is None


async def test_present_and_unknown_workers_are_found_or_not(
    control: Control, gateway_client: FleetClient
) -> None:
    control.own()
    view = await gateway_client.telemetry.worker(WORKER)
    assert view is not None and not view.gone
    assert (view.state, view.tasks, view.held) == ("ready", HELD, ())
    assert 0 < view.lease_left_s <= 60
    assert await gateway_client.telemetry.worker(OTHER) is None


async def test_records_of_ended_workers_are_bounded(
    control: Control, gateway_client: FleetClient
) -> None:
    now_us = int(control.client.time()[0]) * 1_000_000
    end_workers(control, MAX_GONE_KEPT + 5, now_us - DAY_US)
    control.leave(died=True)
    assert control.client.zcard(keys.GONE) == MAX_GONE_KEPT
    assert len(list(control.client.scan_iter(keys.PREFIX + "gone:*"))) == MAX_GONE_KEPT
    listed = [v for v in await gateway_client.telemetry.workers(with_gone=True) if v.gone]
    assert [view.id for view in listed] == [WORKER]
    end_workers(control, MAX_GONE_KEPT, now_us - (GONE_LISTED_S - 60) * 1_000_000)
    listed = [v for v in await gateway_client.telemetry.workers(with_gone=True) if v.gone]
    assert len(listed) == MAX_GONE_LISTED


def end_workers(control: Control, num_workers: int, from_us: int) -> None:
    """Write the records of workers that ended one after the other, a microsecond apart."""
    pipe = control.client.pipeline(transaction=False)
    for number in range(num_workers):
        worker = WorkerId(f"lm@old:{number}:x")
        pipe.zadd(keys.GONE, {worker: from_us + number})
        pipe.hset(keys.gone(worker), mapping={"role": ROLE, "ended_us": from_us + number})
    pipe.execute()


async def test_steps_of_an_hour_are_points_and_those_that_are_over_are_read_once(
    control: Control, redis_url: str
) -> None:
    async with connect_async(redis_url) as reading:
        reader = SeriesReader(reading, get_graph("text"))
        present = int(control.client.time()[0]) // SERIES_STEP_S
        for steps_ago, underruns in ((700, 7), (800, 9)):
            control.client.hset(keys.series(present - steps_ago), "underruns", underruns)
        points = await reader.points()
        assert len(points) == SERIES_KEPT_S // SERIES_STEP_S
        assert sum(point.underruns for point in points) == 7
        control.client.hset(keys.series(present - 700), "underruns", 8)
        assert sum(point.underruns for point in await reader.points()) == 7
        assert len(await reader.read(13)) == 13
        assert sum(point.underruns for point in await reader.points()) == 7


def test_death_is_not_counted_for_an_earlier_process_of_the_same_pid(
    control: Control, redis_url: str
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    worker = WorkerId(f"{ROLE}@{socket.gethostname()}:{ended.pid}:a")
    control.register(worker)
    control.leave(worker)
    ended_us = int(control.client.zscore(keys.GONE, worker) or 0)
    control.client.zadd(keys.GONE, {worker: ended_us - DAY_US})
    assert not fence_process(redis_url, ended.pid, "worker", "SIGKILL", ROLE)
    assert control.client.hget(keys.gone(worker), "cause") == b"", "another process had the pid"
    control.client.zadd(keys.GONE, {worker: ended_us})
    assert fence_process(redis_url, ended.pid, "worker", "SIGKILL", ROLE)
    assert control.client.hget(keys.gone(worker), "cause") == b"SIGKILL"
