"""Endless readers of a Redis stream. A single blocking connection wakes all readers of a stream,
and each of the readers then reads the entries that are new to it.

Knows neither events nor log lines.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.control.connect import entry_order, stream_entries, text
from fleet.process.background import keep_running

log = logging.getLogger(__name__)

BLOCK_MS, COUNT = 1000, 500
GATHER_S = 0.1
"""Seconds that a woken reader waits for further entries, so that it reads a busy stream ten times a
second at most.
"""
Entry = tuple[str, dict[str, bytes]]


class Feed:
    """A Redis stream that any number of readers follow, over one blocking connection. The task that
    waits for new entries runs while there are readers.
    """

    def __init__(self, client: Redis, key: str) -> None:
        self._client = client
        self._key = key
        self._woken = asyncio.Event()
        self._followers = 0
        self._tail: asyncio.Task[None] | None = None

    async def newest(self) -> str:
        found = stream_entries(await self._client.xrevrange(self._key, count=1))
        return found[0][0] if found else "0-0"

    async def has_all_after(self, after: str) -> bool:
        """Return True if all entries after the entry id `after` are still stored."""
        if after == "0-0":
            return True
        found = stream_entries(await self._client.xrange(self._key, count=1))
        if not found or entry_order(after) >= entry_order(found[0][0]):
            return True
        return bool(await self._client.xrange(self._key, min=after, max=after))

    async def follow(self, after: str) -> AsyncGenerator[Entry, None]:
        """Yield the entries after `after`, in order, without end. Raises: redis-py's errors."""
        self._followers += 1
        if self._tail is None:
            self._tail = keep_running(self._wake, f"the reader of the stream {self._key}")
        try:
            while True:
                woken = self._woken
                found = stream_entries(
                    await self._client.xrange(self._key, min=f"({after}", count=COUNT)
                )
                for entry in found:
                    after = entry[0]
                    yield entry
                if not found:
                    await woken.wait()
                    await asyncio.sleep(GATHER_S)
        finally:
            self._followers -= 1
            if not self._followers:
                await self.stop()

    async def stop(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.cancel()
            await asyncio.wait({tail})

    async def _wake(self) -> None:
        """Wake all readers at the start, for entries added before it, and then at each addition.
        While Redis is away at the start, wake readers repeatedly, so that their own reads raise.
        """
        last, me = "", asyncio.current_task()
        # Not `while True`: the Redis client can swallow a cancellation that coincides with a read's
        # own time-out.
        while self._tail is me:
            try:
                newest = await self._next(last)
            except RedisError as error:
                log.info("the stream %s cannot be read (%s); it is tried again", self._key, error)
                await asyncio.sleep(BLOCK_MS / 1000)
                newest = last
            if newest != last or not last:
                woken, self._woken = self._woken, asyncio.Event()
                woken.set()
            last = newest

    async def _next(self, last: str) -> str:
        """Wait until an entry after `last` is added, for `BLOCK_MS` at most; return the id of the
        last entry.
        """
        if not last:
            return await self.newest()
        reply = await self._client.xread({self._key: last}, count=COUNT, block=BLOCK_MS)
        streams = cast("list[tuple[bytes, list[tuple[bytes, object]]]]", reply or [])
        return text(streams[0][1][-1][0]) if streams else last
