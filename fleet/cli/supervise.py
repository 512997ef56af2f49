"""Keepers of the fleet's commands and their calls to Redis: fencing a process that died, announcing
a process that starts, counting other clients, asking whether Redis answers.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import unquote, urlsplit

import psutil
from redis.exceptions import RedisError

from fleet.cli.hangs import Answers, hang_watch
from fleet.cli.keeper import (
    STOP_SIGNALS,
    Keeper,
    KeeperOutput,
    NewProcesses,
    ProcessStarter,
    TerminalOutput,
    WhenDead,
    use_one_thread,
)
from fleet.config.schema import LeaseConfig
from fleet.control import keys, scripts
from fleet.control.connect import connect_async, connect_for_a_call, exchange, text, worker_ids
from fleet.control.log_stream import add_line
from fleet.control.outage import Outage
from fleet.control.starting import place_here
from fleet.core.ids import RoleName, WorkerId, place_of, stage_of
from fleet.core.log_labels import Labels
from fleet.process.beat import START_S, UNBOUNDED_S
from fleet.telemetry.views import GONE_LISTED_S, MAX_GONE_LISTED

FENCE_TIMEOUT_S = 2.0
PYTHON_START_S = 20.0
REDIS_START_S = 5.0
"""Time within which a Redis started at the same time by `fleet up` or honcho is reachable, on a
busy machine.
"""

REDIS, WORKER = "redis", "worker"
REGISTERED = (WORKER, "web", "conductor")
"""Commands whose processes register in Redis and are fenced when they die."""
BEATING = (WORKER, "web", "conductor", "jobs")
"""Commands whose processes beat once they have started. Of the others only stopped ones, and a
Redis that does not answer, count as hung.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the keepers of a deployment share. `redis_url`: address of Redis, None for a command
    that does not use Redis. `lease`: settings by which a process counts as hung.
    """

    redis_url: str | None
    lease: LeaseConfig


async def keep(
    arguments: list[str], surroundings: Surroundings, starter: ProcessStarter | None = None
) -> int:
    """Keep `fleet ARGUMENTS` running until SIGTERM or SIGINT; return the exit status for the
    keeper.
    """
    use_one_thread()
    stop = asyncio.Event()
    for signum in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    return await open_keeper(arguments, stop, surroundings, starter=starter or NewProcesses()).run()


def open_keeper(
    arguments: list[str],
    stop: asyncio.Event,
    surroundings: Surroundings,
    *,
    starter: ProcessStarter,
    output: KeeperOutput | None = None,
    env: Mapping[str, str] | None = None,
) -> Keeper:
    """Return the keeper of `fleet ARGUMENTS`, with its callbacks to Redis: Redis itself is stopped
    last, registered processes are fenced after death, and starts of workers are announced. A
    process that hangs is killed, if the deployment has that switched on.

    `stop`: event that ends the keeper.
    """
    keeper = Keeper(
        arguments=arguments, stop=stop, output=output or TerminalOutput(), env=env, starter=starter
    )
    command, redis_url = arguments[0], surroundings.redis_url
    starting_s = START_S if command in BEATING else UNBOUNDED_S
    keeper.hangs = hang_watch(surroundings.lease, starting_s=starting_s)
    if redis_url is None:
        return keeper
    if command == REDIS:
        keeper.alone = make_alone_check(redis_url)
        if keeper.hangs is not None:
            keeper.hangs = replace(keeper.hangs, answers=make_ping(redis_url))
    role = arguments[1] if command == WORKER else ""
    if command in REGISTERED:
        keeper.when_dead = make_fence(redis_url, command, role)
    if role:
        keeper.starts = WorkerStarts(redis_url, RoleName(role))
    return keeper


def make_fence(redis_url: str, process: str, role: str = "") -> WhenDead:
    """Return a `Keeper.when_dead` callback that fences a dead process in Redis and logs its death.
    `process`: worker, web or conductor. `role`: role of a worker; "" for others.

    While Redis is unreachable nothing is fenced, and the callback returns False; the process keeps
    its rights until its lease lapses.
    """

    async def fence(pid: int, cause: str) -> bool:
        try:
            return await asyncio.to_thread(fence_process, redis_url, pid, process, cause, role)
        except RedisError as error:
            log.warning(
                "process %d could not be fenced, because Redis failed (%s); its tasks wait "
                "until its lease lapses",
                pid,
                error,
            )
            return False

    return fence


def fence_process(redis_url: str, pid: int, process: str, cause: str, role: str = "") -> bool:
    """Fence every worker and gateway that process `pid` of this host registered, and end its
    leadership if it is the leading conductor. Do nothing while the process runs.

    Return True if the process was registered and its death was not handled before. Ids are never
    reused, so a new process with the same pid is not fenced. If two hosts have the same name, a
    living worker may be fenced instead of a dead one; it registers again, as after any lapse. The
    death is logged by the fencing script, or by this function. Raises: RedisError.
    """
    if _is_running(pid):
        return False
    place = (socket.gethostname(), pid)
    with connect_for_a_call(redis_url, FENCE_TIMEOUT_S) as client:
        listed, ended, leads, time = exchange(
            client,
            (),
            ("ZRANGE", keys.WORKERS, 0, -1),
            ("ZREVRANGE", keys.GONE, 0, MAX_GONE_LISTED - 1, "WITHSCORES"),
            ("GET", keys.CONDUCTOR),
            ("TIME",),
        )
        workers = _of_process(listed, place)
        ended_before = _of_process(_ended_lately(ended, time), place)[:1]
        if not workers and ended_before and not client.hget(keys.gone(ended_before[0]), "cause"):
            workers = ended_before  # its lease lapsed before its end was seen, or it had left
        calls = [scripts.fence_worker("", worker, died=True, cause=cause) for worker in workers]
        leader = WorkerId(text(leads).partition("|")[0])
        led = place_of(leader) == place
        exchange(client, [*calls, scripts.lead(leader, text(leads), 1)] if led else calls)
        if led:
            add_line(
                client,
                Labels(process, leader),
                f"conductor {leader} died ({cause}); it was the leader",
                level="warning",
            )
        elif not calls and not ended_before:
            command = f"fleet {process} {role}".rstrip()
            held = (
                "it was not the leader"
                if process == "conductor"
                else "it was not registered, and held no tasks"
            )
            message = f"process {pid} of {place[0]}, `{command}`, died ({cause}); {held}"
            add_line(client, Labels(process, stage=stage_of(role)), message, level="warning")
        return led or bool(calls)


def _ended_lately(ended: object, time: object) -> list[bytes]:
    """Return the ids that ended in the last `GONE_LISTED_S` seconds. An id that ended earlier
    belongs to an older process that had the same pid. `ended`: ids, each followed by the time of
    its end (us). `time`: Redis's reply to TIME.
    """
    ids_and_times = cast("list[bytes]", ended)
    since_us = (int(cast("list[bytes]", time)[0]) - GONE_LISTED_S) * 1_000_000
    return [
        worker
        for worker, ended_us in zip(ids_and_times[::2], ids_and_times[1::2], strict=True)
        if float(ended_us) >= since_us
    ]


def _of_process(workers: object, place: tuple[str, int]) -> list[WorkerId]:
    """Return the worker ids in a Redis reply that belong to one process. `place`: host name and
    pid.
    """
    return [worker for worker in worker_ids(workers) if place_of(worker) == place]


class WorkerStarts:
    """Announces each start of a kept worker in Redis, from the death of its predecessor until the
    new process announces itself.

    Announcements are sent in the background as soon as Redis answers; no start waits for them. An
    announcement is repeated until the process exists, and lapses `PYTHON_START_S` after the start
    unless the process renews it: a keeper that has died announces nothing.
    """

    def __init__(self, redis_url: str, role: RoleName) -> None:
        self._redis_url = redis_url
        self._role = role
        self._place = place_here(os.getpid())
        self._child = self._predecessor = ""
        self._number = 0
        self._stopped = False
        self._outage = Outage(f"the announcement of a start of {role}", quiet_s=REDIS_START_S)
        self._announcing: asyncio.Task[None] | None = None
        self._sender = ThreadPoolExecutor(1)
        """A single thread, so that an announcement cannot overtake its withdrawal."""

    def begin(self, pause_s: float, *, stopped: bool = False) -> None:
        """Announce a start that begins in `pause_s`. `stopped`: whether the previous worker was
        stopped by a signal, as opposed to having failed.
        """
        self._stop()
        self._number, self._stopped = self._number + 1, stopped
        self._child, self._predecessor = "", self._child
        self._announcing = asyncio.create_task(
            self._announce(asyncio.get_running_loop().time() + pause_s)
        )

    def spawned(self, pid: int) -> None:
        self._child = place_here(pid)

    async def end(self, *, failed: bool) -> None:
        """Withdraw the announcement. `failed`: whether the last start counts as failed."""
        self._stop()
        await self._send(
            scripts.end_start(self._role, self._place, child=self._child, failed=failed)
        )

    def _stop(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()

    async def _announce(self, begins_s: float) -> None:
        while True:
            left_us = int(max(begins_s - asyncio.get_running_loop().time(), 0.0) * 1e6)
            lease_us = left_us + int(PYTHON_START_S * 1e6)
            call = scripts.announce_start(
                self._role,
                self._place,
                lease_us,
                instead_of=self._predecessor,
                child=self._child,
                begins_us=left_us,
                number=self._number,
                stopped=self._stopped,
            )
            pause_s = await self._send(call)
            if not pause_s and self._child:
                return
            pause_s = pause_s or PYTHON_START_S / 2  # the start waits for the fork server to load
            await asyncio.sleep(pause_s)

    async def _send(self, call: scripts.Call) -> float:
        """Send a call to Redis. Return 0 if it was sent, else the pause in seconds before the next
        try.
        """
        return await asyncio.get_running_loop().run_in_executor(self._sender, self._call, call)

    def _call(self, call: scripts.Call) -> float:
        try:
            with connect_for_a_call(self._redis_url, FENCE_TIMEOUT_S) as client:
                exchange(client, (call,))
        except RedisError as error:
            return self._outage.add(error)
        self._outage.end()
        return 0.0


def _is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_alone_check(redis_url: str) -> Callable[[], Awaitable[bool]]:
    """Return an async check for Redis's keeper: True if the check itself is the only client of the
    server, or the server does not answer.
    """

    async def alone() -> bool:
        client = connect_async(redis_url)
        try:
            return int((await client.info("clients"))["connected_clients"]) <= 1
        except RedisError:
            return True
        finally:
            await client.aclose()

    return alone


def make_ping(redis_url: str) -> Answers:
    """Return an async function that asks the embedded Redis for a reply. An error counts as a reply
    too, for example a refusal for want of a password or because of too many clients.
    """
    path = unquote(urlsplit(redis_url).path)

    async def answers(timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await _has_reply(path)
        except (OSError, TimeoutError):
            return False

    return answers


async def _has_reply(path: str) -> bool:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(b"PING\r\n")
        return bool(await reader.read(1))
    finally:
        writer.close()
