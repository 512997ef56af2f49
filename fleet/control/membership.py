"""A gateway's membership of the fleet: its id, its lease, and rejoining under a new id after it was
fenced.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import Reply, answer_of, run_async, text, texts
from fleet.core.ids import WorkerId, new_worker_id

log = logging.getLogger(__name__)

Run = Callable[[Redis, scripts.Call], Awaitable[Reply]]
RESTORE_S = 5.0
"""Seconds within which every gateway restores the requests that Redis has lost: gateways notice a
loss at a lease renewal or, within a second, when they compare their streams with Redis.
"""


class Membership:
    """Registration of this gateway, under one id at a time. `rejoined`: coroutine function that is
    awaited after each rejoin.
    """

    def __init__(self, client: Redis, reader: Redis, config: FleetConfig) -> None:
        self._redis = client
        self._reader = reader
        self._lease_us = int(config.lease.worker_ttl_s * 1e6)
        self._capacity = config.limits.max_requests
        self.id: WorkerId = _new_id()
        self.lock = asyncio.Lock()
        """Held while the id changes, and while requests are attached to the id."""
        self.rejoined: Callable[[], Awaitable[None]] | None = None
        self._rejoins: set[asyncio.Task[None]] = set()
        self._restored_s = 0.0

    @property
    def may_miss_requests(self) -> bool:
        """True if Redis was away, or lost this gateway's registration, less than `RESTORE_S` ago. A
        request that Redis does not know may then be about to be restored by its gateway.
        """
        return time.monotonic() < self._restored_s

    def note_loss(self) -> None:
        """Record that Redis may have lost writes."""
        self._restored_s = time.monotonic() + RESTORE_S

    async def register(self) -> None:
        await self._register(self.id)

    async def _register(self, me: WorkerId) -> None:
        fields: dict[str, str | bytes] = {
            "kind": "gateway",
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "capacity": str(self._capacity),
        }
        await run_async(self._redis, scripts.register(me, "", self._lease_us, fields))

    async def renew(self, num_running: int) -> None:
        """Renew the lease, or rejoin if the gateway was fenced. `num_running`: number of requests
        that this gateway holds. Raises: redis's errors.
        """
        me = self.id  # another call may replace it before the reply
        call = scripts.renew(me, self._lease_us, {"running": num_running})
        # not queued behind a burst of requests
        if text(await run_async(self._reader, call)) != "ok":
            await self.rejoin(me)

    async def call(
        self, make: Callable[[WorkerId], scripts.Call], *, unlisted: str, run: Run | None = None
    ) -> tuple[WorkerId, list[str]]:
        """Run a script under this gateway's id. If the answer is `unlisted` (the gateway was
        fenced), rejoin and run the script again under the new id.

        `make`: builds the call for an id. `run`: function that runs the call, in place of
        `run_async`. Returns the id that the script ran under, and its answer.
        Raises: RedisUnreachable, and the errors of `run`.
        """
        me = self.id
        answer = texts(await answer_of((run or run_async)(self._redis, make(me))))
        if answer[0] == unlisted:
            await answer_of(self.rejoin(me))
            me = self.id
            answer = texts(await answer_of((run or run_async)(self._redis, make(me))))
        return me, answer

    async def rejoin(self, former: WorkerId) -> None:
        """Register under a new id, unless another call has already replaced the id `former`. Then
        reattach the requests. Raises: redis's errors.

        A cancelled caller does not cancel the rejoin, which all requests of this gateway wait for.
        """
        rejoining = asyncio.create_task(self._rejoin(former))
        self._rejoins.add(rejoining)
        rejoining.add_done_callback(self._rejoins.discard)
        await asyncio.shield(rejoining)

    async def _rejoin(self, former: WorkerId) -> None:
        async with self.lock:
            if self.id != former:
                return
            log.warning(
                "gateway %s was fenced, or Redis lost its registration; it rejoins under a new id",
                former,
            )
            self.note_loss()
            me = _new_id()
            await self._register(me)
            self.id = me  # only now: calls under an id that is not listed would rejoin again
        if self.rejoined is not None:
            await self.rejoined()

    async def stop(self) -> None:
        for rejoining in list(self._rejoins):
            rejoining.cancel()
        await asyncio.gather(*self._rejoins, return_exceptions=True)

    async def leave(self) -> None:
        await run_async(self._redis, scripts.fence_worker("", self.id))


def _new_id() -> WorkerId:
    return new_worker_id("gateway", socket.gethostname(), os.getpid())
