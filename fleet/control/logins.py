"""Logins of the console in Redis: the name and the expiry of each login. Knows no cookie and no
key.
"""

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import answer_of
from fleet.core.clock import now_us

MAX_LOGINS = 1000
"""Maximum number of logins; beyond it, the least recently used login ends."""


class LoginStore:
    """Store of console logins, shared by all gateways: a sorted set, scored by expiry in
    microseconds. Any method may raise RedisUnreachable.
    """

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def add(self, name: str, keep_s: int) -> None:
        """Save a new login that expires after `keep_s` seconds. Delete logins that have expired or
        exceed `MAX_LOGINS`.
        """
        now = now_us()
        pipe = self._redis.pipeline()
        pipe.zremrangebyscore(keys.LOGINS, "-inf", now)
        pipe.zadd(keys.LOGINS, {name: now + keep_s * 1_000_000})
        pipe.zremrangebyrank(keys.LOGINS, 0, -MAX_LOGINS - 1)
        pipe.expire(keys.LOGINS, keep_s)
        await answer_of(pipe.execute())

    async def ends_us(self, name: str) -> int | None:
        """Return the expiry of a login in microseconds since 1970, which may be past; None for an
        unknown login.
        """
        score = await answer_of(self._redis.zscore(keys.LOGINS, name))
        return None if score is None else int(score)

    async def renew(self, name: str, keep_s: int) -> None:
        """Extend a login to `keep_s` seconds from now. A login that was removed meanwhile is not
        restored.
        """
        pipe = self._redis.pipeline()
        pipe.zadd(keys.LOGINS, {name: now_us() + keep_s * 1_000_000}, xx=True)
        pipe.expire(keys.LOGINS, keep_s)
        await answer_of(pipe.execute())

    async def remove(self, name: str) -> None:
        await answer_of(self._redis.zrem(keys.LOGINS, name))
