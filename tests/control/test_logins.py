"""Console logins in a real Redis: every gateway finds them, they expire, and their number is
bounded.
"""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.logins import MAX_LOGINS, LoginStore
from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable

HOUR_S = 3600


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


async def test_login_is_found_until_it_ends_or_is_removed(
    client: redis.asyncio.Redis, redis_url: str
) -> None:
    store = LoginStore(client)
    await store.add("a", HOUR_S)
    other = await FleetClient.connect(redis_url, FleetConfig())
    ends_us = await other.logins.ends_us("a")
    assert ends_us is not None and 0 < ends_us - now_us() <= HOUR_S * 1_000_000
    assert await store.ends_us("b") is None
    await other.logins.remove("a")
    assert await store.ends_us("a") is None
    await other.stop()


async def test_renewal_prolongs_a_login_and_revives_none(client: redis.asyncio.Redis) -> None:
    store = LoginStore(client)
    await store.add("a", 60)
    await store.renew("a", HOUR_S)
    ends_us = await store.ends_us("a")
    assert ends_us is not None and ends_us - now_us() > 60 * 1_000_000
    await store.remove("a")
    await store.renew("a", HOUR_S)
    assert await store.ends_us("a") is None


async def test_logins_beyond_the_bound_replace_the_oldest_and_the_key_expires(
    client: redis.asyncio.Redis,
) -> None:
    store = LoginStore(client)
    await client.zadd(
        keys.LOGINS,
        {f"old{number}": now_us() + 10_000_000 + number for number in range(MAX_LOGINS)},
    )
    await client.zadd(keys.LOGINS, {"ended": now_us() - 1})
    await store.add("new", HOUR_S)
    assert await client.zcard(keys.LOGINS) == MAX_LOGINS
    assert await store.ends_us("new") is not None and await store.ends_us("ended") is None
    assert await store.ends_us("old0") is None and await store.ends_us("old1") is not None
    assert 0 < await client.ttl(keys.LOGINS) <= HOUR_S


async def test_login_lookup_without_redis_raises_redis_unreachable() -> None:
    async with redis.asyncio.Redis.from_url("redis://127.0.0.1:1") as nowhere:
        with pytest.raises(RedisUnreachable):
            await LoginStore(nowhere).ends_us("a")
