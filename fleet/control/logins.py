"""Logins of the console in Redis: the name of each, and when it ends. Knows no cookie and no key."""

import redis.asyncio

from fleet.control import keys
from fleet.control.connect import answer_of
from fleet.core.clock import now_us

MAX_LOGINS = 1000
"""Beyond them the login that was not used for the longest time ends."""


class LoginStore:
    """One sorted set for all gateways, scored by the end of each login, us. Raises, from any method: RedisUnreachable."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client

    async def add(self, name: str, keep_s: int) -> None:
        """Keep a new login, and drop those that have ended and those beyond the bound."""
        now = now_us()
        pipe = self._redis.pipeline()
        pipe.zremrangebyscore(keys.LOGINS, "-inf", now)
        pipe.zadd(keys.LOGINS, {name: now + keep_s * 1_000_000})
        pipe.zremrangebyrank(keys.LOGINS, 0, -MAX_LOGINS - 1)
        pipe.expire(keys.LOGINS, keep_s)
        await answer_of(pipe.execute())

    async def ends_us(self, name: str) -> int | None:
        """Return when the login ends, which may be past; None if it is not known."""
        score = await answer_of(self._redis.zscore(keys.LOGINS, name))
        return None if score is None else int(score)

    async def renew(self, name: str, keep_s: int) -> None:
        """Prolong a login that is still there; one that was removed meanwhile stays removed."""
        pipe = self._redis.pipeline()
        pipe.zadd(keys.LOGINS, {name: now_us() + keep_s * 1_000_000}, xx=True)
        pipe.expire(keys.LOGINS, keep_s)
        await answer_of(pipe.execute())

    async def remove(self, name: str) -> None:
        await answer_of(self._redis.zrem(keys.LOGINS, name))
