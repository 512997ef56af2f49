"""Times after which refused requests should come back. Knows no request."""

import asyncio
import contextlib
import math
import time
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.control import scripts
from fleet.control.connect import run_async, texts

MAX_RETRY_AFTER_S = 60
"""Largest `Retry-After` in seconds: OpenAI's SDKs ignore a longer time."""
BACKLOG_S = 1.0
"""Age in seconds up to which a reading of the backlog is used again."""
USUAL_ANSWER_S = 5.0
"""Assumed duration of an answer while none has ended."""


class Backlog(NamedTuple):
    """Load of the fleet, as read by the script `backlog`. `num_gateways`: number of gateways at
    which requests wait. `ends_per_ks`: recent rate at which requests end, per 1000 s.
    """

    num_waiting: int = 0
    num_gateways: int = 0
    num_live: int = 0
    ends_per_ks: int = 0


class RetryTimes:
    """Times after which refused requests should come back: one after the other, behind the waiting
    requests, at the rate at which requests have ended recently.
    """

    def __init__(self, client: Redis) -> None:
        self._redis = client
        self._lock = asyncio.Lock()
        self._backlog = Backlog()
        self._read_s = -math.inf
        self._promised_s = 0.0
        """Time at which the last refused request is expected back."""

    async def next_s(self, num_waiting: int, num_reported: int) -> int:
        """Return the seconds after which the next refused request should come back. The time is
        then taken: a further call returns a later one, up to `MAX_RETRY_AFTER_S`.

        `num_waiting`: number of requests that wait at this gateway. `num_reported`: number of this
        gateway's waiting requests in the count that Redis has.
        """
        backlog = await self._read()
        per_s = backlog.ends_per_ks / 1000 or max(backlog.num_live, 1) / USUAL_ANSWER_S
        ahead = max(backlog.num_waiting - num_reported, 0) + num_waiting
        now_s = time.monotonic()
        back_s = max(self._promised_s, now_s + ahead / per_s) + max(backlog.num_gateways, 1) / per_s
        self._promised_s = min(back_s, now_s + MAX_RETRY_AFTER_S)
        return min(max(1, math.ceil(self._promised_s - now_s)), MAX_RETRY_AFTER_S)

    async def _read(self) -> Backlog:
        async with self._lock:
            if time.monotonic() - self._read_s > BACKLOG_S:
                with contextlib.suppress(RedisError):
                    answer = texts(await run_async(self._redis, scripts.backlog()))
                    self._backlog = Backlog(*map(int, answer))
                self._read_s = time.monotonic()
        return self._backlog
