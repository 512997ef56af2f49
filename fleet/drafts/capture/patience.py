"""Calls that are repeated while Redis is away, so that a training run outlasts its restart."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fleet.core.errors import RedisUnreachable

T = TypeVar("T")
AWAY_S = 60.0
RETRY_S = 0.2


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call, which is repeated while Redis is away. Raises: its
    RedisUnreachable after `AWAY_S`.
    """
    deadline_s = time.monotonic() + AWAY_S
    while True:
        try:
            return await call()
        except RedisUnreachable:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)
