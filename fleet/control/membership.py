"""A gateway's membership of the fleet: its id, its lease, and rejoining under a new id after it was
fenced.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import Reply, answer_of, run_async, text, texts
from fleet.core.ids import WorkerId, new_worker_id

log = logging.getLogger(__name__)

Run = Callable[[Redis, scripts.Call], Awaitable[Reply]]


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

    async def register(self) -> None:
        fields: dict[str, str | bytes] = {
            "kind": "gateway",
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "capacity": str(self._capacity),
        }
        await run_async(self._redis, scripts.register(self.id, "", self._lease_us, fields))

    async def renew(self, num_running: int) -> None:
        """Renew the lease, or rejoin if the gateway was fenced. `num_running`: number of requests
        that it holds. Raises: redis's errors.
        """
        call = scripts.renew(self.id, self._lease_us, {"running": num_running})
        # not queued behind a burst of requests
        if text(await run_async(self._reader, call)) != "ok":
            await self._rejoin(self.id)

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
            # A cancelled caller must not cancel the rejoin, which all requests of this gateway wait
            # for.
            rejoining = asyncio.create_task(self._rejoin(me))
            self._rejoins.add(rejoining)
            rejoining.add_done_callback(self._rejoins.discard)
            await answer_of(asyncio.shield(rejoining))
            me = self.id
            answer = texts(await answer_of((run or run_async)(self._redis, make(me))))
        return me, answer

    async def _rejoin(self, former: WorkerId) -> None:
        """Register under a new id, unless another call has already replaced the id `former`. Then
        reattach the requests.
        """
        async with self.lock:
            if self.id != former:
                return
            log.warning(
                "gateway %s was fenced, or Redis lost its registration; it rejoins under a new id",
                former,
            )
            self.id = _new_id()
            await self.register()
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
