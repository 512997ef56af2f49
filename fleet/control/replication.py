"""Submissions that wait until replicas of Redis have them (`redis.wait_replicas`)."""

import asyncio

from redis.asyncio import Redis

from fleet.config.schema import RedisConfig
from fleet.control import scripts
from fleet.control.connect import Reply, first_text, run_async, run_with
from fleet.core.errors import NotReplicated

MAX_REPLICATING = 8
"""Number of concurrent submissions that wait for replicas, each on its own connection. The rest of
the pool is kept for acknowledgements.
"""


class Replication:
    """Runs submissions and waits for replicas. `options`: how many replicas, and for how long."""

    def __init__(self, options: RedisConfig) -> None:
        self._options = options
        self._replicating = asyncio.Semaphore(MAX_REPLICATING)

    async def run(self, client: Redis, call: scripts.Call) -> Reply:
        """Run a submission, and wait until an accepted one is on `redis.wait_replicas` replicas.
        Raises: NotReplicated, redis errors.
        """
        options = self._options
        if not options.wait_replicas:
            return await run_async(client, call)
        async with self._replicating:
            reply, answer = await run_with(
                client, call, "WAIT", options.wait_replicas, options.wait_timeout_ms
            )
        num_synced = answer if isinstance(answer, int) else 0  # Redis may refuse to wait
        if first_text(reply) == "ok" and num_synced < options.wait_replicas:
            raise NotReplicated.of(num_synced, options.wait_replicas, options.wait_timeout_ms)
        return reply
