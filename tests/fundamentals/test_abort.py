"""An abort stops all work for a request and frees its resources within a second."""

import asyncio
import random

import redis

from fleet.control import keys
from tests.harness import answer, fake_spec, gateway, held, open_fleet, thread_fleet, wait_none_live
from tests.support import NEVER_EXPIRES, wait_until


async def test_abort_ends_every_stage(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        stream = await client.requests.submit(fake_spec(fleet, num_tokens=100_000), None)
        async for chunk in stream:
            if chunk.edge == "audio":
                break
        assert held(fleet) == {stream.request_id}
        await stream.abort("the client left")
        wait_until(lambda: not held(fleet), "every worker to drop the request", timeout_s=1.0)
        assert all(loop.engine.stats().running == 0 for loop in fleet.loops)
        view = await client.telemetry.trace(stream.request_id)
        assert view is not None and view.state == "aborted"


async def test_concurrent_aborts_leave_no_tasks_or_keys(redis_url: str) -> None:
    """300 requests, a third aborted at random moments: every remaining key has a time to live or
    outlives requests by design.
    """
    rng = random.Random(7)
    with thread_fleet(redis_url, "limits.max_requests=400") as fleet:
        async with gateway(fleet) as client:
            slots = asyncio.Semaphore(40)

            async def run_one(number: int) -> None:
                async with slots:
                    spec = fake_spec(fleet, num_tokens=rng.randrange(1, 30), seed=number)
                    if number % 3:
                        await answer(client, spec)
                        return
                    stream = await client.requests.submit(spec, None)
                    leave_after = rng.randrange(0, 12)
                    async for chunk in stream:
                        if chunk.index >= leave_after:
                            break
                    await stream.abort("the client left")

            await asyncio.gather(*(run_one(number) for number in range(300)))
            await wait_none_live(client, timeout_s=2.0)
        wait_until(lambda: not held(fleet), "workers to hold nothing")
        assert all(loop.engine.stats().running == 0 for loop in fleet.loops)
        assert all(loop.transfer.used_slots() == 0 for loop in fleet.loops)
        assert_every_key_expires(redis_url)


def assert_every_key_expires(url: str) -> None:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        for key in client.scan_iter():
            row = keys.row_of(key)
            assert row is not None, f"{key} has no row in the key table"
            assert row.life != "live", f"{key} outlives its request"
            assert row.life != "retention" or client.ttl(key) != NEVER_EXPIRES, (
                f"{key} has no time to live"
            )
