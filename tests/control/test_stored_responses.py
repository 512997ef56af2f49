"""Stored responses in a real Redis: they expire, and are bounded in bytes."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from fleet.config.schema import WebConfig
from fleet.control import keys
from fleet.control.connect import text
from fleet.control.responses import MIB, ResponseStore
from fleet.core.errors import RedisUnreachable

CONFIG = WebConfig(response_retention_s=3600, max_stored_responses_mib=16)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def store(client: redis.asyncio.Redis) -> ResponseStore:
    return ResponseStore(client, CONFIG)


async def stored(client: redis.asyncio.Redis) -> tuple[set[str], int]:
    """Return the ids of the stored responses and the sum of their sizes, after a check of the
    index.
    """
    prefix = keys.response("")
    ids = {text(key).removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*")}
    sizes = {text(name): int(size) for name, size in (await client.hgetall(SIZES)).items()}
    total = sizes.pop("*", 0)
    assert set(sizes) == ids == {text(name) for name in await client.zrange(INDEX, 0, -1)}
    assert sum(sizes.values()) == total
    return ids, total


INDEX, SIZES = f"{keys.PREFIX}responses", f"{keys.PREFIX}responses:sizes"


async def test_response_expires_after_its_retention(
    client: redis.asyncio.Redis, store: ResponseStore
) -> None:
    await store.save("resp_1", "anna", b"record")
    assert 3590 < await client.ttl(keys.response("resp_1")) <= 3600
    await client.zadd(INDEX, {"resp_1": 1})
    await client.delete(keys.response("resp_1"))  # as its expiry does
    assert await store.load("resp_1", "anna") is None
    await store.save("resp_2", "anna", b"other")
    assert await stored(client) == ({"resp_2"}, 5)


async def test_responses_beyond_the_bound_replace_those_that_expire_first(
    client: redis.asyncio.Redis, store: ResponseStore
) -> None:
    for number in range(20):
        await store.save(f"resp_{number}", "anna", b"x" * MIB)
    ids, total = await stored(client)
    assert ids == {f"resp_{number}" for number in range(4, 20)} and total == 16 * MIB
    await store.save("resp_19", "anna", b"x" * MIB)  # the reply of the first call was lost
    assert (await stored(client))[1] == 16 * MIB
    assert await store.delete("resp_19", "anna") and not await store.delete("resp_0", "anna")
    assert (await stored(client))[1] == 15 * MIB


async def test_response_lookup_without_redis_raises_redis_unreachable() -> None:
    async with redis.asyncio.Redis.from_url("redis://127.0.0.1:1") as nowhere:
        with pytest.raises(RedisUnreachable):
            await ResponseStore(nowhere, CONFIG).load("resp_1", "anna")
