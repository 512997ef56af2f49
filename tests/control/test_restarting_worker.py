"""While a role's only worker restarts, new requests wait for it; if no worker is expected, they are
refused immediately.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import cast

import msgspec
import psutil
import pytest
import redis

from fleet.cli.supervise import WorkerStarts
from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run, text
from fleet.control.starting import StartAnnouncement, place_here
from fleet.control.stream import ClientStream
from fleet.core.errors import FleetError, NoWorker, Overloaded
from fleet.core.ids import EdgeName, RoleName
from fleet.telemetry.views import LogQuery, RoleView
from tests.control_plane import log_lines
from tests.disturbances import restart_empty
from tests.harness import (
    ANSWER_TIMEOUT_S,
    ThreadFleet,
    collected,
    fake_spec,
    fake_spec_of,
    gateway_at,
    open_fleet,
)
from tests.support import REPO, RedisProcess, await_until, wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

SINCE_DEATH_S = (0.7, 1.5, 2.5, 3.5, 29.0)
NUM_TOKENS = 5
SPLIT = REPO / "configs" / "thinker_pd.yaml"
START_LEASE_US = 100_000_000
SHORT_CLAIM_TIMEOUT = "lease.claim_timeout_s=0.2"
"""Setting of a short claim timeout: a killed worker that still reads may take a grant with it,
which is then overdue.
"""
TALKER, THINKER, TEXT = RoleName("talker"), RoleName("thinker"), EdgeName("text")


def kill(fleet: ThreadFleet, role: str) -> None:
    fleet.kill(next(loop for loop in fleet.loops if loop.role == role))


def set_time_since_loss(fleet: ThreadFleet, role: str, seconds: float) -> None:
    """Pretend that the role's last worker was lost `seconds` ago."""
    now_s, micros = fleet.clients[0].time()
    lost_us = now_s * 1_000_000 + micros - int(seconds * 1e6)
    fleet.clients[0].hset(keys.availability(RoleName(role)), "lost_us", lost_us)


async def submit(fleet: ThreadFleet, client: FleetClient) -> ClientStream:
    return await client.requests.submit(fake_spec(fleet, num_tokens=NUM_TOKENS), None)


async def num_tokens(stream: ClientStream) -> int:
    """Read the whole answer; return its number of tokens."""
    received = await asyncio.wait_for(collected(stream, stream.spec), ANSWER_TIMEOUT_S)
    return len(received[TEXT])


async def role_of(client: FleetClient, name: RoleName) -> RoleView:
    return next(view for view in await client.telemetry.roles() if view.role == name)


@pytest.mark.parametrize(
    ("file", "role"),
    [(None, "thinker"), (None, "code2wav"), (SPLIT, "thinker.prefill"), (SPLIT, "thinker.decode")],
)
async def test_requests_submitted_after_the_only_worker_died_are_answered_by_the_next(
    redis_url: str, file: Path | None, role: str
) -> None:
    async with open_fleet(redis_url, SHORT_CLAIM_TIMEOUT, file=file) as (fleet, client):
        kill(fleet, role)
        streams: list[ClientStream] = []
        for seconds in SINCE_DEATH_S:
            set_time_since_loss(fleet, role, seconds)
            streams.append(await submit(fleet, client))
        assert await client.telemetry.missing_roles() == [role], (
            "the fleet is not ready without the role"
        )
        set_time_since_loss(fleet, role, 31.0)
        with pytest.raises(
            NoWorker,
            match=f"no worker serves the role {role}; start one with `fleet worker {role}`",
        ):
            await submit(fleet, client)
        fleet.add_worker(role)
        assert await asyncio.gather(*map(num_tokens, streams)) == [NUM_TOKENS] * len(SINCE_DEATH_S)


async def test_time_to_retry_is_the_duration_of_the_last_start_up_to_a_minute(
    redis_url: str,
) -> None:
    async with open_fleet(redis_url, without=TALKER) as (fleet, client):
        with pytest.raises(NoWorker, match=r"serves the role talker; .* try again in 5 s"):
            await submit(fleet, client)
        assert await client.telemetry.num_live() == 0
        for took_us, retry_s in ((12_300_000, 13), (400_000, 1), (300_000_000, 60)):
            run(fleet.clients[0], scripts.announce_start(TALKER, "test:9", START_LEASE_US))
            run(fleet.clients[0], scripts.end_start(TALKER, "test:9", took_us=took_us))
            with pytest.raises(NoWorker) as refused:
                await submit(fleet, client)
            assert refused.value.retry_after_s == retry_s


async def test_requests_wait_for_the_first_worker_of_a_role_while_it_loads(redis_url: str) -> None:
    async with open_fleet(redis_url, without=TALKER) as (fleet, client):

        async def starts() -> bool:
            return (await role_of(client, TALKER)).starting == 1

        async def has_loaded() -> bool:
            return (await role_of(client, TALKER)).loaded_percent == 34

        with StartAnnouncement(redis_url, fleet.config.role(TALKER)) as start:
            await await_until(starts, "the start to be announced")
            assert (await role_of(client, TALKER)).loaded_percent is None
            start.loaded(0.345)
            await await_until(has_loaded, "the announcement to be renewed")
            stream = await submit(fleet, client)
            fleet.add_worker(TALKER)
            start.joined()
            view = await role_of(client, TALKER)
            assert (view.starting, view.workers, view.loaded_percent) == (0, 1, None)
        assert await num_tokens(stream) == NUM_TOKENS
        assert int(text(fleet.clients[0].hget(keys.availability(TALKER), "took_us"))) > 0


async def test_worker_that_cannot_load_is_not_expected(redis_url: str) -> None:
    async with open_fleet(redis_url, without=TALKER) as (fleet, client):
        with pytest.raises(MemoryError), StartAnnouncement(redis_url, fleet.config.role(TALKER)):
            raise MemoryError
        with pytest.raises(NoWorker, match=TALKER):
            await submit(fleet, client)


def test_stopped_loading_process_is_not_counted_as_failed_start(own_redis: RedisProcess) -> None:
    load = f"""
import signal
from fleet.config import load_config
from fleet.control.starting import StartAnnouncement, place_here
config = load_config(None, ("engine=fake", "device=cpu"))
with StartAnnouncement({own_redis.url!r}, config.role("talker")) as start:
    start.end_by(signal.SIGTERM)
    signal.pause()
"""
    with (
        redis.Redis.from_url(own_redis.url) as client,
        psutil.Popen([sys.executable, "-c", load]) as process,
    ):
        wait_until(
            lambda: client.hget(keys.availability(TALKER), "tries") == b"1",
            "the start to be announced",
            timeout_s=60,
        )
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGTERM
        assert client.hget(keys.availability(TALKER), "tries") == b"0"
        fields = [
            text(name) for name in cast("list[bytes]", client.hkeys(keys.availability(TALKER)))
        ]
        assert not [name for name in fields if name.startswith("start:")]


@pytest.mark.parametrize("joins", [True, False], ids=["the worker joins", "the keeper gives up"])
async def test_conductor_keeps_a_request_while_a_start_is_announced(
    redis_url: str, *, joins: bool
) -> None:
    """The conductor keeps a request while a start of its role is announced. The failure of a second
    request shows that the conductor still checks after the grace time.
    """
    async with open_fleet(redis_url, "lease.no_worker_timeout_s=0.5", SHORT_CLAIM_TIMEOUT) as (
        fleet,
        client,
    ):
        run(fleet.clients[0], scripts.announce_start(THINKER, "test:9", START_LEASE_US))
        kill(fleet, THINKER)
        set_time_since_loss(fleet, THINKER, 60.0)
        text_spec = msgspec.structs.replace(
            fake_spec(fleet, num_tokens=NUM_TOKENS), outputs=(TEXT,)
        )
        waiting = await client.requests.submit(text_spec, None)
        speech_stream = await submit(fleet, client)
        kill(fleet, TALKER)
        with pytest.raises(FleetError, match="no worker serves the role talker"):
            await num_tokens(speech_stream)
        assert await client.telemetry.num_live() == 1
        if joins:
            fleet.add_worker(THINKER)
            assert await num_tokens(waiting) == NUM_TOKENS
        else:
            run(fleet.clients[0], scripts.end_start(THINKER, "test:9"))
            with pytest.raises(FleetError, match="no worker serves the role thinker"):
                await num_tokens(waiting)


async def test_load_longer_than_no_worker_timeout_loses_no_request(redis_url: str) -> None:
    """A model load longer than `no_worker_timeout_s` loses no request. The failure of a request for
    another role, lost during the load, shows that the load was longer.
    """
    async with open_fleet(
        redis_url, "lease.no_worker_timeout_s=0.5", SHORT_CLAIM_TIMEOUT, without=THINKER
    ) as (fleet, client):

        async def submit_text() -> ClientStream:
            spec = msgspec.structs.replace(fake_spec(fleet, num_tokens=NUM_TOKENS), outputs=(TEXT,))
            return await client.requests.submit(spec, None)

        async def starts() -> bool:
            return (await role_of(client, THINKER)).starting == 1

        with StartAnnouncement(redis_url, fleet.config.role(THINKER)) as start:
            await await_until(starts, "the start to be announced")
            streams = [await submit_text() for _ in range(3)]
            speech_stream = await submit(fleet, client)
            kill(fleet, TALKER)
            with pytest.raises(FleetError, match="no worker serves the role talker"):
                await num_tokens(speech_stream)
            streams += [await submit_text() for _ in range(3)]
            assert await client.telemetry.num_live() == len(streams), (
                "all wait for the worker that loads"
            )
            fleet.add_worker(THINKER)
            start.joined()
        assert await asyncio.gather(*map(num_tokens, streams)) == [NUM_TOKENS] * len(streams)


async def test_empty_redis_admits_requests_for_rejoining_workers(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    config = load_config(None, ("engine=fake", "device=cpu"))
    async with gateway_at(own_redis.url, config) as client:
        with pytest.raises(NoWorker, match="thinker, talker, code2wav"):
            await client.requests.submit(fake_spec_of(config), None)
        restart_empty(own_redis, tmp_path / "redis")
        await await_until(client.ping, "the gateway to reach Redis again")
        await client.requests.submit(fake_spec_of(config), None)
        assert await client.telemetry.num_live() == 1
        assert not (await client.telemetry.logs(LogQuery())).lines, (
            "an admitted request is not logged as refused"
        )


async def test_keeper_announces_starts_once_redis_answers(own_redis: RedisProcess) -> None:
    own_redis.stop()
    starts = WorkerStarts(own_redis.url, TALKER)
    starts.begin(0.0)
    starts.spawned(1)
    own_redis.start()
    async with gateway_at(
        own_redis.url, load_config(None, ("engine=fake", "device=cpu"))
    ) as client:

        async def announced() -> bool:
            return (await role_of(client, TALKER)).starting == 1

        await await_until(announced, "the start to be announced")
        await starts.end(failed=True)
        assert not await announced()


async def test_keeper_repeats_the_announcement_until_the_process_exists(
    own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper repeats its announcement until the process exists: the start may wait for a fork
    server that loads for longer than one announcement lasts.
    """
    monkeypatch.setattr("fleet.cli.supervise.PYTHON_START_S", 1.0)
    starts, announced = WorkerStarts(own_redis.url, TALKER), f"start:{place_here(os.getpid())}"
    with redis.Redis.from_url(own_redis.url) as client:

        async def deadlines() -> bool:
            seen.add(client.hget(keys.availability(TALKER), announced))
            return len(seen - {None}) >= 3

        seen = set[object]()
        starts.begin(0.0)
        await await_until(deadlines, "the announcement to be repeated twice")
        assert client.hget(keys.availability(TALKER), "tries") == b"1", "it is one start"
        await starts.end(failed=False)
        assert not client.hexists(keys.availability(TALKER), announced)


async def test_admission_check_returns_free_places_and_reserves_none(redis_url: str) -> None:
    async with open_fleet(redis_url, SHORT_CLAIM_TIMEOUT, "limits.max_requests=2") as (
        fleet,
        client,
    ):
        kill(fleet, THINKER)
        spec = fake_spec(fleet)
        for _ in range(3):
            assert await client.requests.check_admission(spec.id, spec.outputs) == 2
        streams = [await submit(fleet, client)]
        assert await client.requests.check_admission(spec.id, spec.outputs) == 1
        streams.append(await submit(fleet, client))
        with pytest.raises(Overloaded):
            await submit(fleet, client)
        for _ in range(3):
            with pytest.raises(Overloaded, match="2 requests are running or waiting already"):
                await client.requests.check_admission(spec.id, spec.outputs)
        (line,) = [line for line in log_lines(fleet.clients[0]) if "is refused" in line.message]
        assert "limits.max_requests allows 2" in line.message
        assert await client.telemetry.num_live() == 2
        fleet.add_worker(THINKER)
        await asyncio.gather(*map(num_tokens, streams))


async def test_admission_check_refuses_only_for_roles_of_the_request(redis_url: str) -> None:
    async with open_fleet(redis_url, without=TALKER) as (fleet, client):
        spec = fake_spec(fleet)
        with pytest.raises(NoWorker, match="no worker serves the role talker"):
            await client.requests.check_admission(spec.id, spec.outputs)
        assert (
            await client.requests.check_admission(spec.id, (TEXT,))
            == fleet.config.limits.max_requests
        )
