"""What a supervisor asks of Redis: to end the right of a process that died, and whether anybody else is there. Starts none."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import psutil
from redis.exceptions import RedisError

FENCE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


def fence_at(redis_url: str) -> Callable[[int], Awaitable[None]]:
    """A `Keeper.when_dead` that fences what the dead process had registered; a Redis that is away leaves it to the lease."""

    async def fence(pid: int) -> None:
        try:
            await asyncio.wait_for(fence_process(redis_url, pid), FENCE_TIMEOUT_S)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("process %d could not be fenced (%s); its lease will lapse", pid, error)

    return fence


async def fence_process(redis_url: str, pid: int) -> None:
    """Fence every worker and gateway that process `pid` of this host registered.

    By incarnation, whose id is never used again: a process that meanwhile got the same pid has another one. Should two hosts
    bear one name, a living worker may be fenced for a dead one; it joins anew, as after any lapse.
    """
    from fleet.control import scripts
    from fleet.control.connect import connect_async, run_async
    from fleet.control.views import read_workers

    client = connect_async(redis_url)
    try:
        for worker in await read_workers(client):
            if worker.pid == pid and worker.host == socket.gethostname() and not _is_running(pid):
                await run_async(client, scripts.fence_worker("", worker.id, died=True))
    finally:
        await client.aclose()


def _is_running(pid: int) -> bool:
    """A process that ended and was not collected yet is not running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alone_at(redis_url: str) -> Callable[[], Awaitable[bool]]:
    """Whether the one who asks is the server's only client; a server that does not answer has none."""
    from fleet.control.connect import connect_async

    async def alone() -> bool:
        client = connect_async(redis_url)
        try:
            return int((await client.info("clients"))["connected_clients"]) <= 1
        except RedisError:
            return True
        finally:
            await client.aclose()

    return alone
