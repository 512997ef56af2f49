"""A gateway's connection to the fleet: its lease, its inbox, and the clients of everything that a
gateway reads or writes in Redis.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.config.schema import RENEWALS
from fleet.control import keys
from fleet.control.alerts import AlertStore
from fleet.control.connect import (
    MAX_CONNECTIONS,
    Reply,
    answer_of,
    connect_async,
    pairs,
    slices,
    text,
)
from fleet.control.job_client import JobClient
from fleet.control.logged_chunks import LogReads
from fleet.control.logins import LoginStore
from fleet.control.membership import Membership
from fleet.control.notices import AnyNotice, parse_notices
from fleet.control.operations import Operations
from fleet.control.outage import Outage, cause_of
from fleet.control.pacing import Pacing
from fleet.control.redis_status import RedisStatus
from fleet.control.requests import GatewayRequests
from fleet.control.responses import ResponseStore
from fleet.control.scripts import VoiceHold
from fleet.control.stream import ClientStream
from fleet.control.stream_recovery import SLICE
from fleet.control.telemetry.board import Telemetry
from fleet.control.training import TrainingClient
from fleet.control.voice import HeldVoice, Saved, VoiceStore
from fleet.control.waiting import BACKGROUND, Applicant, ClientShare
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import WorkerId
from fleet.process.background import keep_running
from fleet.telemetry.views import SERIES_STEP_S

__all__ = [
    "AlertStore",
    "BACKGROUND",
    "Applicant",
    "ClientShare",
    "ClientStream",
    "FleetClient",
    "GatewayRequests",
    "HeldVoice",
    "JobClient",
    "LoginStore",
    "Operations",
    "ResponseStore",
    "TrainingClient",
    "Saved",
    "Telemetry",
    "VoiceStore",
    "VoiceHold",
]

log = logging.getLogger(__name__)

_InboxReply = list[tuple[bytes, list[tuple[bytes, object]]]]
INBOX_BLOCK_MS = 500
INBOX_COUNT = 512
SLOW_POLL_S = 1.0


class FleetClient:
    """Control-plane client of one gateway. Call `start()` before requests are submitted and
    `stop()` at the end, on the same event loop.
    """

    def __init__(self, url: str, config: FleetConfig) -> None:
        self._redis = connect_async(url)
        self._reader = connect_async(url)
        self.config = config
        self._membership = Membership(self._redis, self._reader, config)
        self._status = RedisStatus(self._reader, config.limits.max_redis_memory_percent)
        self.telemetry = Telemetry(self._redis, self._reader, config, self._status)
        self.requests = GatewayRequests(
            self._redis,
            config,
            self._membership,
            self._status,
            on_refusal=self.telemetry.record_refusal,
        )
        self.operations = Operations(self._redis, config, self.requests.submit_without_client)
        self.jobs = JobClient(url, config.data_dir)
        self.voice = VoiceStore(self._redis, config.voice, self._membership)
        self.logins = LoginStore(self._redis)
        self.alerts = AlertStore(self._redis)
        self.responses = ResponseStore(self._redis, config.web)
        self.training = TrainingClient(self._redis, config)
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        self._returned = asyncio.Event()
        """Set when Redis answers again, and may have lost its last writes."""

    @classmethod
    async def connect(cls, redis_url: str, config: FleetConfig) -> Self:
        """Create a client without connecting: if Redis is unreachable, `start()` or the first call
        raises.
        """
        return cls(redis_url, config)

    @property
    def id(self) -> WorkerId:
        """Id of this gateway in the fleet. The id changes when the gateway rejoins after its lease
        has lapsed.
        """
        return self._membership.id

    async def start(self) -> None:
        """Join the fleet as a gateway. Raises: RedisUnreachable after 10 s."""
        for attempt in range(100):
            try:
                await self._membership.register()
                await self.requests.start()
                break
            except RedisError as error:
                if attempt == 99:
                    raise RedisUnreachable(
                        f"no gateway can join: {cause_of(error)}; start a Redis with `fleet redis`"
                    ) from error
                await asyncio.sleep(0.1)
        renewal_s = self.config.lease.worker_ttl_s / RENEWALS
        polling, series = Outage("the poll of this gateway"), Outage("the time series")
        loops = {
            "the renewal of the lease": lambda: self._repeat(
                self._renew_lease, renewal_s, self._status.writes
            ),
            "the reading of the inbox": self._read_inbox,
            "the endings owed": self.requests.endings.run,
            "the slow poll": lambda: self._repeat(
                self._poll, SLOW_POLL_S, polling, early=self._returned
            ),
            "the time series": lambda: self._repeat(
                lambda: self.telemetry.write_series(self.id), SERIES_STEP_S, series
            ),
        }
        self._loops = [
            keep_running(loop, f"{name} of this gateway") for name, loop in loops.items()
        ]

    async def open_connections(self) -> None:
        """Open all connections of the pool, so that a burst of requests waits for no handshake, and
        a growing number of open files means a leak.

        Connections are opened one after the other: with TLS, each of thirty concurrent handshakes
        would last as long as all together, which on a loaded machine exceeds the time limit of
        each. Raises: RedisUnreachable.
        """
        pool = self._redis.connection_pool
        opened: list[AbstractConnection] = []
        try:
            for _ in range(MAX_CONNECTIONS):
                opened.append(await answer_of(pool.get_connection()))
        finally:
            for connection in opened:
                await pool.release(connection)

    async def stop(self) -> None:
        """Leave the fleet. Requests still held wait `lease.gateway_timeout_s` for another gateway,
        and are then aborted.
        """
        # The flag too: the Redis client can swallow a cancellation that coincides with a read's own
        # time-out.
        self._stopping = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(
            *self._loops, self.requests.stop(), self._membership.stop(), return_exceptions=True
        )
        await self.telemetry.stop()
        if self._loops:
            with contextlib.suppress(RedisError):
                await self.requests.endings.send()
                await self._membership.leave()
        await self._redis.aclose()
        await self._reader.aclose()

    async def ping(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except RedisError:
            return False

    async def _repeat(
        self,
        work: Callable[[], Awaitable[object]],
        pause_s: float,
        outage: Outage,
        early: asyncio.Event | None = None,
    ) -> None:
        """Call `work` in a loop, after a pause of `pause_s` seconds each time. A Redis error is
        recorded in `outage`, and the loop continues. `early`: event that ends the pause when set;
        `work` clears it.
        """
        early = early or asyncio.Event()
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(early.wait(), pause_s)
            try:
                await work()
            except RedisError as error:
                outage.add(error)
            else:
                outage.end()

    async def _renew_lease(self) -> None:
        await self._membership.renew(self.requests.num_held)
        await self.requests.recovery.reconcile()

    async def _read_inbox(self) -> None:
        """Read this gateway's inbox and deliver its notices, until the client stops. The id of the
        last notice is remembered, so that no notice is lost when a connection breaks.
        """
        last, inbox, untrimmed = "0-0", keys.inbox(self.id), 0
        outage, is_lossy = Outage("the inbox of this gateway"), False
        pacing = Pacing()
        while not self._stopping:
            if inbox != keys.inbox(self.id):
                last, inbox = "0-0", keys.inbox(self.id)
            try:
                await asyncio.sleep(pacing.wait_s(self.requests.num_held))
                block_ms = None if is_lossy else INBOX_BLOCK_MS
                reply = await self._reader.xread({inbox: last}, count=INBOX_COUNT, block=block_ms)
                entries = [
                    entry for _, found in cast("_InboxReply", reply or []) for entry in found
                ]
                await self._deliver(
                    [notice for _, raw in entries for notice in parse_notices(pairs(raw))]
                )
            except RedisError as error:
                self._membership.note_loss()
                is_lossy = True
                await asyncio.sleep(outage.add(error))
                continue
            outage.end()
            if is_lossy:
                is_lossy = False
                self._returned.set()
            last = text(entries[-1][0]) if entries else last
            untrimmed += len(entries)
            if untrimmed and (untrimmed >= INBOX_COUNT or not reply):
                untrimmed = 0
                with contextlib.suppress(RedisError):
                    await self._redis.xtrim(inbox, minid=last, approximate=False)

    async def _deliver(self, notices: Sequence[AnyNotice]) -> None:
        """Deliver notices to their requests. Chunks that are too large for a notice are read from
        the logs first. Raises: redis-py's errors.
        """
        reads = LogReads([notice for notice in notices if self.requests.wants(notice)])
        replies: list[Reply] = []
        for commands in slices(reads.commands, SLICE):
            pipe = self._reader.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            replies += await pipe.execute()
        for notice in reads.resolve(replies):
            self.requests.deliver(notice)

    async def _poll(self) -> None:
        """Recover from lost notices, and check the memory of Redis. Runs once per `SLOW_POLL_S`;
        chunks whose notices arrive do not wait for this poll. Runs at once when Redis returns after
        an outage: a request that Redis has lost can be restored only while this gateway lives.
        """
        if self._returned.is_set():
            self._returned.clear()
            await self.requests.recovery.catch_up(also_moved=True)
        await self._status.read_memory()
        await self.requests.recovery.catch_up()
