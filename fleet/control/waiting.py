"""Requests that wait at a gateway until the fleet has a place for them.

Redis orders the clients, over all gateways (`take_turns`); a gateway orders the requests of one
client by their arrival. While no request waits, nothing is read or written. Knows no stream.
"""

import asyncio
import contextlib
import math
import random
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.control import scripts
from fleet.control.connect import run_async, texts
from fleet.control.membership import Membership
from fleet.control.outage import Outage
from fleet.control.retry_times import RetryTimes
from fleet.core.errors import Aborted, FleetError, GatewayStopping, Overloaded
from fleet.core.ids import RoleName, WorkerId
from fleet.process.background import start

POLL_S = 0.1
"""Mean pause between two queries for free places, which bounds the time until the end of a request
at another gateway is noticed. The end of a request at this gateway causes a query at once.
"""
STOPPING = "this gateway stops; send the request again, to another gateway"
STOP_S = 1.0
MIB = 1024 * 1024


class ClientShare(NamedTuple):
    """A client as fair shares count it. `weight`: a client of weight 2 gets twice the share of a
    client of weight 1; 0 is for requests in the background, which are admitted after all others
    (`lua/common/shares.lua`).
    """

    name: str = ""
    weight: float = 1.0

    @property
    def key(self) -> str:
        """Name of the client in Redis: `name`, or `name*weight` if the weight is not 1."""
        return self.name if self.weight == 1 else f"{self.name}*{self.weight:g}"

    def load(self, size: int) -> float:
        """Return `size` divided by the client's weight; infinity for requests in the background."""
        return size / self.weight if self.weight else math.inf


BACKGROUND = ClientShare("background", 0.0)
"""The client of all requests in the background."""


@dataclass(slots=True, eq=False)
class Applicant:
    """A request that asks for admission and may wait for it. `num_bytes`: memory that the request
    occupies while it waits. `roles`: roles that get its tasks. `arrived_s`: time of its arrival, by
    which the requests of a client are ordered. `began_s`: time from which its wait is measured;
    both times are of the monotonic clock. `key`: API key whose `limits` apply; "" for none.

    While `is_queued`, the request waits for the event `turn`, or `is_trying` is True: its turn has
    come, and it asks Redis for a place. `is_dismissed`: it had to leave for another request.
    """

    client: ClientShare
    num_bytes: int = 0
    roles: tuple[RoleName, ...] = ()
    arrived_s: float = field(default_factory=time.monotonic)
    began_s: float = field(default_factory=time.monotonic)
    key: str = ""
    limits: KeyLimits = NO_LIMITS
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    is_queued: bool = False
    is_trying: bool = False
    is_dismissed: bool = False
    refusal: FleetError | None = None

    def refuse(self, error: FleetError) -> None:
        """End the wait with `error`; a wait that has not begun ends as soon as it begins."""
        self.refusal = error
        self.turn.set()

    def withdraw(self) -> None:
        """End the wait of a request whose client has left."""
        self.refuse(Aborted("the client left before its request was admitted"))


def client_key(applicant: Applicant | None) -> str:
    """Return the key of the client to whose live requests a request is added; "" for a request of
    the fleet itself, which has no applicant.
    """
    return applicant.client.key if applicant is not None else ""


def limits_of(applicant: Applicant | None) -> KeyLimits:
    return applicant.limits if applicant is not None else NO_LIMITS


@dataclass(slots=True)
class _ClientQueue:
    """Waiting requests of one client, the oldest first."""

    client: ClientShare
    applicants: list[Applicant] = field(default_factory=list[Applicant])
    num_bytes: int = 0

    def add(self, applicant: Applicant) -> None:
        insort(self.applicants, applicant, key=lambda each: each.arrived_s)
        self.num_bytes += applicant.num_bytes

    def remove(self, applicant: Applicant) -> None:
        self.applicants.remove(applicant)
        self.num_bytes -= applicant.num_bytes


@dataclass(slots=True)
class _Turns:
    """The clients whose turn it is, and the room for their requests: free places, and the number of
    tasks that the workers of each role would soon claim.
    """

    num_free: int
    soon: dict[RoleName, int]
    clients: list[str]

    def has_place(self, roles: Sequence[RoleName]) -> bool:
        return self.num_free > 0 and all(self.soon.get(role, 1) > 0 for role in roles)

    def take(self, roles: Sequence[RoleName], num: int = 1) -> None:
        self.num_free -= num
        for role in roles:
            if role in self.soon:
                self.soon[role] -= num


class WaitingRequests:
    """The requests that wait at one gateway: at most `limits.max_waiting`, which together occupy at
    most `limits.max_waiting_mib`.

    Beyond these limits the newest request of the client whose queue is largest for its weight has
    to leave, so that no client can fill the queue for the others.
    """

    def __init__(self, client: Redis, config: FleetConfig, membership: Membership) -> None:
        self._redis = client
        self._limits = config.limits
        self._roles = [role.name for role in config.roles()]
        self._membership = membership
        self._queues: dict[str, _ClientQueue] = {}
        self.num_waiting = 0
        self.num_preparing = 0
        """Number of requests of this gateway whose input is being prepared and which hold no place
        yet; free places are kept for them.
        """
        self._num_bytes = 0
        self._changes = Counter[str]()
        """By client: change of the number of waiting requests that Redis does not know yet."""
        self._num_reported = 0
        self._is_reported = True
        self._listed_as: WorkerId | None = None
        """Worker id under which this gateway has reported its waiting requests to Redis; None if
        all of them must be reported again, or none waits.
        """
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._is_closed = False
        self._retries = RetryTimes(client)

    def is_behind(self, applicant: Applicant) -> bool:
        """Return True if `applicant` is not queued, and requests of the same client wait here."""
        return not applicant.is_queued and applicant.client.key in self._queues

    async def wait(self, applicant: Applicant) -> bool:
        """Wait until it may be the turn of `applicant`, which then stays queued until `leave`.
        Return False, with the request removed from the queue, if `limits.max_wait_s` have passed
        since `began_s`, if the queue has no room, or if another request took its place in the
        queue.

        Raises: GatewayStopping; the error of `Applicant.refuse`.
        """
        if self._is_closed:
            applicant.refuse(GatewayStopping(STOPPING))
        try:
            may_try = await self._find_turn(applicant)
        except BaseException:  # a cancellation too
            self.leave(applicant)
            raise
        if not may_try or applicant.refusal is not None:
            self.leave(applicant)
        if applicant.refusal is not None:
            raise applicant.refusal
        return may_try

    async def _find_turn(self, applicant: Applicant) -> bool:
        left_s = applicant.began_s + self._limits.max_wait_s - time.monotonic()
        if applicant.refusal is not None or left_s <= 0 or not self._queue(applicant):
            return False
        try:
            async with asyncio.timeout(left_s):
                await applicant.turn.wait()
        except TimeoutError:
            return False
        return not applicant.is_dismissed

    async def refusal(self, cause: str) -> Overloaded:
        """Return the error of a refused request, with the time after which to send it again."""
        retry_s = await self._retries.next_s(self.num_waiting, self._num_reported)
        return Overloaded(f"{cause}; try again in {retry_s} s", retry_after_s=retry_s)

    def leave(self, applicant: Applicant) -> None:
        """Remove a request that was admitted or given up. Idempotent."""
        if not applicant.is_queued:
            return
        applicant.is_queued = False
        queue = self._queues[applicant.client.key]
        queue.remove(applicant)
        if not queue.applicants:
            del self._queues[applicant.client.key]
        self._count(applicant, -1)

    def count_preparing(self, by: int) -> None:
        self.num_preparing += by
        self._wake.set()

    def wake(self) -> None:
        """Query for free places now instead of after the pause. Called when a request has ended."""
        self._wake.set()

    def close(self) -> None:
        """Refuse all waiting requests, and later ones, because the gateway stops."""
        self._is_closed = True
        for queue in self._queues.values():
            for applicant in queue.applicants:
                applicant.refuse(GatewayStopping(STOPPING))

    async def stop(self) -> None:
        """Refuse all waiting requests and later ones, and wait up to `STOP_S` until Redis has no
        record of waiting requests of this gateway.
        """
        self.close()
        if self._loop is not None:
            await asyncio.wait({self._loop}, timeout=STOP_S)
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def _queue(self, applicant: Applicant) -> bool:
        """Add a request to the queue; a request that is queued already, and got no place at its
        turn, keeps its position and waits again. Return False if the queue has no room.
        """
        applicant.turn.clear()
        applicant.is_trying = False
        if applicant.is_queued:
            return True
        if not self._make_room(applicant):
            return False
        queue = self._queues.setdefault(applicant.client.key, _ClientQueue(applicant.client))
        queue.add(applicant)
        applicant.is_queued = True
        self._count(applicant, 1)
        if self._loop is None or self._loop.done():
            self._loop = start(self._run(), "the queue of requests at this gateway")
        return True

    def _count(self, applicant: Applicant, by: int) -> None:
        self.num_waiting += by
        self._num_bytes += by * applicant.num_bytes
        self._changes[applicant.client.key] += by
        self._is_reported = False
        self._wake.set()

    def _make_room(self, applicant: Applicant) -> bool:
        max_bytes = self._limits.max_waiting_mib * MIB
        while self.num_waiting >= self._limits.max_waiting:
            if not self._dismiss_for(applicant, 1, lambda queue: len(queue.applicants)):
                return False
        while self._num_bytes + applicant.num_bytes > max_bytes:
            if not self._dismiss_for(applicant, applicant.num_bytes, lambda queue: queue.num_bytes):
                return False
        return True

    def _dismiss_for(
        self, applicant: Applicant, own: int, size: Callable[[_ClientQueue], int]
    ) -> bool:
        """Dismiss the newest request of the client whose queue is largest for its weight. Return
        False, and dismiss nothing, if no queue would be larger than the queue of `applicant`'s
        client, or if that newest request is trying. `own`: size of `applicant`.
        """
        queues = self._queues.values()
        largest = max(queues, key=lambda queue: queue.client.load(size(queue)), default=None)
        mine = self._queues.get(applicant.client.key)
        own += size(mine) if mine is not None else 0
        if largest is None or largest.client.load(size(largest)) <= applicant.client.load(own):
            return False
        newest = largest.applicants[-1]
        if newest.is_trying:
            return False
        newest.is_dismissed = True
        newest.turn.set()
        self.leave(newest)
        return True

    async def _run(self) -> None:
        """Report the waiting requests to Redis and wake those whose turn it is, again and again
        until no request waits and Redis knows that.
        """
        outage = Outage("the queue of requests at this gateway")
        while self._queues or not self._is_reported:
            self._wake.clear()
            try:
                turns = await self._take_turns()
            except RedisError as error:
                self._is_reported = False
                await asyncio.sleep(outage.add(error))
                continue
            outage.end()
            self._release(turns)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S * random.uniform(0.75, 1.25)):
                    await self._wake.wait()

    async def _take_turns(self) -> _Turns:
        """Report the waiting requests, and read whose turn it is. Raises: redis's errors."""
        me = self._membership.id
        is_all = me != self._listed_as
        own = {key: len(queue.applicants) for key, queue in self._queues.items()}
        numbers = own if is_all else {key: by for key, by in self._changes.items() if by}
        self._changes.clear()
        self._listed_as, self._is_reported = None, True
        call = scripts.take_turns(
            me,
            bound=self._limits.max_requests,
            roles=self._roles,
            numbers=numbers,
            is_all=is_all,
        )
        answer = texts(await run_async(self._redis, call))
        if answer[0] == "unlisted":
            return await self._take_turns()
        self._listed_as = me if own else None
        self._num_reported = sum(own.values())
        num_free, *soon = map(int, answer[1 : 2 + len(self._roles)])
        return _Turns(num_free, dict(zip(self._roles, soon, strict=True)), answer[2 + len(soon) :])

    def _release(self, turns: _Turns) -> None:
        """Wake waiting requests, one for each free place, in turn for each client of `turns`.
        Places that other requests of this gateway try to take, or prepare for, do not count as
        free.
        """
        turns.take(self._roles, self.num_preparing)
        for queue in self._queues.values():
            for applicant in queue.applicants:
                if applicant.is_trying:
                    turns.take(applicant.roles)
        queues = [self._queues[key] for key in turns.clients if key in self._queues]
        while queues:
            queues = [queue for queue in queues if self._release_one(queue, turns)]

    def _release_one(self, queue: _ClientQueue, turns: _Turns) -> bool:
        """Wake the client's oldest request for which there is a place. Return False if there is
        none.
        """
        for applicant in queue.applicants:
            if not applicant.is_trying and turns.has_place(applicant.roles):
                turns.take(applicant.roles)
                applicant.is_trying = True
                applicant.turn.set()
                return True
        return False
