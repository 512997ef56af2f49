"""A gateway while Redis refuses writes or is nearly full: the gateway keeps its id and its answers,
and reports the cause.
"""

import asyncio
import logging

import pytest
import redis

from fleet.control import keys, membership, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import Reply, connect, run
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import WorkerId
from tests.harness import ThreadFleet, answer, assert_same, fake_spec, open_fleet
from tests.support import RedisProcess, await_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")


async def check_refused(fleet: ThreadFleet, client: FleetClient, pattern: str) -> RedisUnreachable:
    with pytest.raises(RedisUnreachable, match=pattern) as refused:
        await client.requests.submit(fake_spec(fleet), None)
    return refused.value


def lease_deadline(admin: redis.Redis, gateway: WorkerId) -> float:
    return float(admin.zscore(keys.WORKERS, gateway) or 0)


async def test_gateway_keeps_its_id_and_logs_one_outage_while_redis_refuses_writes(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_fleet(own_redis.url, "lease.worker_ttl_s=1.0") as (fleet, client):
        with connect(own_redis.url) as admin:
            me, expected = client.id, await answer(client, fake_spec(fleet))

            async def has_lapsed() -> bool:
                seconds, micros = admin.time()
                return lease_deadline(admin, me) < seconds * 1e6 + micros

            async def serves() -> bool:
                return not client.telemetry.redis_trouble()

            admin.config_set("min-replicas-to-write", 1)
            await await_until(has_lapsed, "the lease of the gateway to lapse")
            assert "NOREPLICAS" in client.telemetry.redis_trouble()
            await check_refused(
                fleet,
                client,
                r"Redis refuses writes \(NOREPLICAS\).*min-replicas-to-write: start them",
            )
            admin.config_set("min-replicas-to-write", 0)
            await await_until(serves, "the gateway to renew its lease")
            assert_same(await answer(client, fake_spec(fleet)), expected)
            assert client.id == me
    lines = [record.message for record in caplog.records if "this gateway" in record.message]
    begins = [line for line in lines if "NOREPLICAS" in line and "; this gateway waits" in line]
    assert len(begins) == 1 and any("Redis serves this gateway again" in line for line in lines), (
        lines
    )


async def test_new_requests_are_refused_before_the_memory_of_redis_is_full(
    own_redis: RedisProcess,
) -> None:
    """When Redis's memory is nearly full, the running request ends normally, and the next one is
    admitted only once there is room.
    """
    async with open_fleet(own_redis.url, "limits.max_redis_memory_percent=50") as (fleet, client):
        with connect(own_redis.url) as admin:
            expected, spec = await answer(client, fake_spec(fleet)), fake_spec(fleet)
            running = await client.requests.submit(spec, None)

            async def is_full() -> bool:
                return bool(client.telemetry.redis_trouble())

            async def has_room() -> bool:
                return not client.telemetry.redis_trouble()

            admin.config_set("maxmemory", int(int(admin.info("memory")["used_memory"]) * 1.5))
            await await_until(is_full, "the gateway to look at the memory")
            error = await check_refused(
                fleet,
                client,
                r"limits.max_redis_memory_percent .* beyond 50 % .* raise its maxmemory",
            )
            assert error.retry_after_s == 10
            chunks = [chunk async for chunk in running]
            assert sum(chunk.final for chunk in chunks) == len(spec.outputs), (
                "the running request ends"
            )
            admin.config_set("maxmemory", 0)
            await await_until(has_room, "the gateway to see room")
            assert_same(await answer(client, fake_spec(fleet)), expected)


@pytest.mark.parametrize("setting", ["min-replicas-to-write", "maxmemory"])
async def test_complete_spoken_answer_waits_for_redis_to_save_its_transcript(
    own_redis: RedisProcess, setting: str
) -> None:
    """The end of a spoken answer waits until Redis accepts its transcript. All audio is sent
    before, so an error instead would end a stream that lacks nothing.
    """
    async with open_fleet(own_redis.url) as (_, client):
        with connect(own_redis.url) as admin:
            admin.config_set(setting, 1)
            saving = asyncio.ensure_future(
                client.voice.save_transcript("audio-1", "some words", 2_000_000_000)
            )

            async def was_refused() -> bool:
                return (
                    int(admin.info("errorstats").get("errorstat_EXECABORT", {}).get("count", 0)) > 1
                )

            await await_until(was_refused, "the write to be refused more than once")
            assert not saving.done() and not admin.exists(keys.transcript("audio-1"))
            admin.config_set(setting, 0)
            assert await saving == 2_000_000_000
            assert await client.voice.transcript("audio-1") == "some words"


async def test_fenced_gateway_joins_once_under_a_burst_of_requests(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive while a fenced gateway registers wait for its new id: under an unlisted
    one they would be stale, and fenced gateway after fenced gateway would follow.
    """
    begun: list[asyncio.Task[object]] = []
    joined: list[str] = []
    send = membership.run_async

    async def send_late(to: membership.Redis, call: scripts.Call) -> Reply:
        if call.script == "register":
            joined.append(call.script)
            if len(joined) < 5:
                begun.extend(asyncio.create_task(submit()) for _ in range(3))
                await asyncio.wait(begun, timeout=0.2)
        return await send(to, call)

    async with open_fleet(redis_url) as (fleet, gateway):

        async def submit() -> object:
            return await gateway.requests.submit(fake_spec(fleet), None)

        run(client, scripts.fence_worker("", gateway.id))
        monkeypatch.setattr(membership, "run_async", send_late)
        await submit()
        await asyncio.gather(*begun)
    assert len(joined) == 1
