"""Calls of a supervisor to Redis: end the right of a process that died, have requests wait for one that it starts, and
whether anybody else is there. Starts none.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import psutil
from redis.exceptions import RedisError

from fleet.cli.keeper import WhenDead
from fleet.control import keys, scripts
from fleet.control.connect import connect_async, connect_for_a_call, exchange, text
from fleet.control.log_stream import add_line
from fleet.control.starting import place_here
from fleet.core.ids import RoleName, WorkerId, place_of, stage_of
from fleet.core.log_labels import Labels

FENCE_TIMEOUT_S = 2.0
PYTHON_START_S = 20.0
RETRY_S = 0.5

log = logging.getLogger(__name__)


def make_fence(redis_url: str, process: str, role: str = "") -> WhenDead:
    """A `Keeper.when_dead` of a `process` (worker, web or conductor): fences what it had registered, and logs its death.

    `role` is what a worker serves. A Redis that is away leaves both to the lease.
    """

    async def fence(pid: int, cause: str) -> bool:
        try:
            return await asyncio.to_thread(fence_process, redis_url, pid, process, cause, role)
        except RedisError as error:
            log.warning("process %d could not be fenced (%s); its lease will lapse", pid, error)
            return False

    return fence


def fence_process(redis_url: str, pid: int, process: str, cause: str, role: str = "") -> bool:
    """Fence every worker and gateway that process `pid` of this host registered, and end its lead if it led.

    Returns True if it had any, and its death was not seen before. By incarnation, whose id is never used again: a process that
    meanwhile got the same pid has another one. If two hosts have one name, a living worker may be fenced for a dead one; it
    registers again, as after any lapse.
    The death is a line of the fleet's log: written by the script that fences, else here.
    """
    if _is_running(pid):
        return False
    gone = (socket.gethostname(), pid)
    client = connect_for_a_call(redis_url, FENCE_TIMEOUT_S)
    try:
        listed, ended, leads = exchange(
            client, (), ("ZRANGE", keys.WORKERS, 0, -1), ("ZREVRANGE", keys.GONE, 0, -1), ("GET", keys.CONDUCTOR)
        )
        workers, ended_before = _of_process(listed, gone), _of_process(ended, gone)[:1]
        if not workers and ended_before and not client.hget(keys.gone(ended_before[0]), "cause"):
            workers = ended_before  # its lease lapsed before its end was seen, or it had left
        calls = [scripts.fence_worker("", worker, died=True, cause=cause) for worker in workers]
        leader = WorkerId(text(leads).partition("|")[0])
        led = place_of(leader) == gone
        exchange(client, [*calls, scripts.lead(leader, text(leads), 1)] if led else calls)
        if led:
            add_line(client, Labels(process, leader), f"conductor {leader} died ({cause}); it led", level="warning")
        elif not calls and not ended_before:
            command = f"fleet {process} {role}".rstrip()
            held = "it did not lead" if process == "conductor" else "it was not registered, and held nothing"
            said = f"process {pid} of {gone[0]}, `{command}`, died ({cause}); {held}"
            add_line(client, Labels(process, stage=stage_of(role)), said, level="warning")
        return led or bool(calls)
    finally:
        client.close()


def _of_process(workers: object, place: tuple[str, int]) -> list[WorkerId]:
    """Return which of the worker ids that Redis answered with are of the process."""
    ids = [WorkerId(text(name)) for name in cast("list[bytes]", workers)]
    return [worker for worker in ids if place_of(worker) == place]


class WorkerStarts:
    """Announces each start of a kept worker, from the death of the one before until the new process announces itself.

    Announcements are sent in the background, as soon as Redis answers: no start waits for them. One that no process continues
    lapses `PYTHON_START_S` after its start, so that a keeper that died expects no worker.
    """

    def __init__(self, redis_url: str, role: RoleName) -> None:
        self._redis_url, self._role = redis_url, role
        self._place, self._child, self._former = place_here(os.getpid()), "", ""
        self._number, self._stopped = 0, False
        self._announcing: asyncio.Task[None] | None = None
        self._line = ThreadPoolExecutor(1)
        """Sends one call after the other: an announcement under way must not overtake the end."""

    def begin(self, pause_s: float, *, stopped: bool = False) -> None:
        """A worker is started in `pause_s`. `stopped`: the one before was stopped and did not fail."""
        self._stop()
        self._number, self._stopped = self._number + 1, stopped
        self._child, self._former = "", self._child
        self._announcing = asyncio.create_task(self._announce(asyncio.get_running_loop().time() + pause_s))

    def spawned(self, pid: int) -> None:
        self._child = place_here(pid)

    async def end(self, *, failed: bool) -> None:
        """No worker is started any more. `failed`: the last start counts as a failed one."""
        self._stop()
        await self._send(scripts.end_start(self._role, self._place, child=self._child, failed=failed))

    def _stop(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()

    async def _announce(self, begins_s: float) -> None:
        while True:
            left_us = int(max(begins_s - asyncio.get_running_loop().time(), 0.0) * 1e6)
            lease_us = left_us + int(PYTHON_START_S * 1e6)
            call = scripts.announce_start(
                self._role, self._place, lease_us, instead_of=self._former, child=self._child, begins_us=left_us,
                number=self._number, stopped=self._stopped,
            )  # fmt: skip
            if await self._send(call):
                return
            await asyncio.sleep(RETRY_S)

    async def _send(self, call: scripts.Call) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._line, self._ask, call)

    def _ask(self, call: scripts.Call) -> bool:
        client = connect_for_a_call(self._redis_url, FENCE_TIMEOUT_S)
        try:
            exchange(client, (call,))
            return True
        except RedisError:
            return False
        finally:
            client.close()


def _is_running(pid: int) -> bool:
    """A process that ended and was not collected yet is not running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_alone_check(redis_url: str) -> Callable[[], Awaitable[bool]]:
    """Whether the one who asks is the server's only client; a server that does not answer has none."""

    async def alone() -> bool:
        client = connect_async(redis_url)
        try:
            return int((await client.info("clients"))["connected_clients"]) <= 1
        except RedisError:
            return True
        finally:
            await client.aclose()

    return alone
