"""Endings that a gateway owes to Redis: aborts, final acknowledgements and detachments, each kept
until Redis has answered, and remembered for a while after, since Redis may lose its last writes.

Knows no stream and no client.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.control import scripts
from fleet.control.connect import Reply, run_each_async, slices, texts
from fleet.control.membership import Membership
from fleet.control.outage import is_away
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName, WorkerId
from fleet.telemetry.counts import RECEIVED

log = logging.getLogger(__name__)

MAX_ENDINGS = 4096
"""Least capacity of the table of endings: more than a gateway has in a second, the period whose
writes Redis may lose.
"""
SLICE = 100
"""Number of endings per round trip, so that other calls wait no longer than a few milliseconds."""
REPEAT_S = 0.1
"""Seconds between two tries to send what is owed."""
BELOW_ALL = Epoch(1)
"""Epoch below every epoch that Redis issues, for endings by a gateway that does not know at which
epoch it holds the request. Redis accepts such an ending only if no other gateway holds the request.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(ABC):
    """An end that a gateway owes to Redis for one request. `epoch`: epoch of the client edges at
    which the gateway holds the request.
    """

    request: RequestId
    epoch: Epoch
    is_final: ClassVar[bool] = True
    """True if the ending remains valid when the epoch changes (after a lapsed lease, or a loss of
    Redis's last writes), as long as no other gateway holds the request. Such an ending is
    remembered after Redis has answered.
    """

    @abstractmethod
    def calls(self) -> list[scripts.Call]:
        """Return the calls that end the request. The last reply tells whether Redis accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Ending):
    reason: str

    def calls(self) -> list[scripts.Call]:
        return [scripts.abort(self.request, self.epoch, self.reason)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalAcks(Ending):
    """Acknowledgement of a whole answer. `consumed`: number of chunks by edge; `producers`:
    producing stage by edge. `receipts`: statistics of chunk arrivals for the trace.

    The acknowledgements give unlimited credit: any part that Redis has lost is then computed again
    without a reader.
    """

    consumed: Mapping[EdgeName, int]
    producers: Mapping[EdgeName, StageName]
    receipts: bytes | None

    def calls(self) -> list[scripts.Call]:
        last = list(self.consumed)[-1]
        acks = [
            scripts.Ack(
                request=self.request,
                stage=CLIENT,
                epoch=self.epoch,
                edge=edge,
                consumed=count,
                producer=self.producers[edge],
                delivered=edge == last,
                closed=True,
            )
            for edge, count in self.consumed.items()
        ]
        # Before the last acknowledgement, which may close the request and its epoch.
        return [*self._report(), scripts.ack(acks)]

    def _report(self) -> list[scripts.Call]:
        if self.receipts is None:
            return []
        name = f"{RECEIVED}:{self.epoch}"
        return [scripts.set_task_metadata(self.request, CLIENT, self.epoch, name, self.receipts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(Ending):
    """End of this gateway's part in a request that it does not read: another gateway may attach."""

    gateway: WorkerId
    is_final: ClassVar[bool] = False

    def calls(self) -> list[scripts.Call]:
        return [scripts.detach(self.request, self.gateway, self.epoch)]


class EndingsOwed:
    """Table of the endings of one gateway, by request. An ending is sent again until Redis has
    answered. Answered endings are remembered, the latest last, to be sent again if Redis lost them.

    `is_read`: function that returns True if this gateway reads the request's answer; an older
    ending of such a request is void.

    Invariants: a request has one ending, owed or answered. The table has at most `bound` endings;
    beyond it the oldest answered one is forgotten, or the oldest one if none is answered.
    """

    def __init__(
        self,
        client: Redis,
        membership: Membership,
        *,
        is_read: Callable[[RequestId], bool] = lambda _: False,
        bound: int = MAX_ENDINGS,
    ) -> None:
        self._redis = client
        self._membership = membership
        self._is_read = is_read
        self._bound = max(bound, MAX_ENDINGS)
        self._owed: dict[RequestId, Ending] = {}
        self._answered: dict[RequestId, Ending] = {}
        self._tried: set[RequestId] = set()
        """Requests whose ending was sent without an answer."""
        self._sending = asyncio.Lock()
        self._num_rounds = 0
        self._away: RedisError | None = None
        """Error of the last round; None if Redis answered."""
        self._left_over = asyncio.Event()

    @property
    def owed(self) -> set[RequestId]:
        """Requests with an ending that Redis has not answered."""
        return set(self._owed)

    def owe(self, ending: Ending) -> None:
        """Add an ending, in place of an earlier one of the request; `run` sends it."""
        self._add(ending)
        self._left_over.set()

    def owe_again(self, request: RequestId) -> bool:
        """Owe the remembered ending of a request again, since Redis has lost the ending. Return
        True if an ending of the request is owed now.
        """
        ending = self._answered.get(request)
        if ending is not None:
            self.owe(ending)
        return request in self._owed

    async def settle(self, ending: Ending) -> None:
        """Add an ending and send it. If Redis is away, return after one try; `run` repeats it."""
        self._add(ending)
        try:
            async with self._sending:
                # While this call waited, another one may have sent it with its own.
                if self._owed.get(ending.request) is ending and ending.request not in self._tried:
                    await self._send()
        except RedisError:
            log.debug("the end of request %s is sent again later", ending.request)
        finally:
            if ending.request in self._owed:
                self._left_over.set()

    async def send(self) -> None:
        """Send all endings that are owed. Raises: redis's errors while Redis is away."""
        async with self._sending:
            await self._send()

    async def send_overdue(self) -> None:
        """Send all owed endings if Redis left one unanswered before. Call this before new work,
        since requests that Redis does not know to have ended take up places. Raises: redis's errors
        while Redis is away.
        """
        if not self._tried:
            return
        before = self._num_rounds
        async with self._sending:
            if self._num_rounds == before:
                await self._send()
            elif self._away is not None:  # one try serves all callers that waited for it
                raise self._away

    async def run(self) -> None:
        """Send endings that Redis has not answered, again and again. Never returns."""
        while True:
            await self._left_over.wait()
            try:
                await self.send()
            except RedisError:
                log.debug("%d requests wait for Redis to end", len(self._owed))
            if self._owed:
                await asyncio.sleep(REPEAT_S)
            else:
                self._left_over.clear()

    def _add(self, ending: Ending) -> None:
        request = ending.request
        self._answered.pop(request, None)
        self._tried.discard(request)
        self._owed[request] = ending
        if len(self._owed) + len(self._answered) <= self._bound:
            return
        if self._answered:
            del self._answered[next(iter(self._answered))]
            return
        oldest = next(iter(self._owed))
        log.warning("the end of request %s is given up: too many requests wait for theirs", oldest)
        self._tried.discard(oldest)
        del self._owed[oldest]

    async def _send(self) -> None:
        sent = list(self._owed.values())
        self._away = None
        try:
            refused: list[Ending] = []
            for endings in slices(sent, SLICE):
                refused += await self._send_slice(endings)
            for endings in slices(refused, SLICE):
                await self._send_slice(await self._retake(endings))
        except RedisError as error:
            self._away = error
            raise
        finally:
            self._num_rounds += 1
            self._tried |= {ending.request for ending in sent} & self._owed.keys()
            if self._owed:
                self._left_over.set()

    async def _send_slice(self, endings: Sequence[Ending]) -> list[Ending]:
        """Send endings in one round trip. Return the final endings that Redis refused because of
        their epoch, and that may still be valid. Raises: redis's errors while Redis is away.
        """
        calls = [ending.calls() for ending in endings]
        replies = iter(await run_each_async(self._redis, [call for each in calls for call in each]))
        refused: list[Ending] = []
        away: RedisError | None = None
        for ending, sent in zip(endings, calls, strict=True):
            *_, reply = [next(replies) for _ in sent]
            if isinstance(reply, RedisError) and is_away(reply):
                away = reply
            elif not _is_stale(ending, reply):
                self._note_answer(ending)
            elif ending.is_final and not self._is_read(ending.request):
                refused.append(ending)
            else:
                self._drop(ending)
        if away is not None:
            raise away
        return refused

    async def _retake(self, endings: Sequence[Ending]) -> list[Ending]:
        """Attach this gateway again to requests whose epoch was refused, unless another gateway
        holds the request at a higher epoch. Return the endings at the new epochs.
        """
        held = {ending.request: ending.epoch for ending in endings}
        try:
            gateway, answers = await self._membership.call(
                lambda me: scripts.reattach(me, held), unlisted="unlisted"
            )
        except RedisUnreachable:
            return []
        if answers[0] == "unlisted":
            return []
        retaken: list[Ending] = []
        for ending, answer, epoch in zip(endings, answers[::2], answers[1::2], strict=True):
            if self._owed.get(ending.request) is not ending:
                continue
            if answer not in ("ok", "stale"):
                self._note_answer(ending)
            elif answer == "stale" or self._is_read(ending.request):
                self._drop(ending)
            else:
                now = replace(ending, epoch=Epoch(int(epoch)))
                self._owed[ending.request] = now
                retaken.append(now)
        if retaken:
            log.info("gateway %s retook %d requests in order to end them", gateway, len(retaken))
        return retaken

    def _note_answer(self, ending: Ending) -> None:
        """Record that Redis has answered an ending; remember the ending if it is final."""
        if self._drop(ending) and ending.is_final:
            self._answered[ending.request] = ending

    def _drop(self, ending: Ending) -> bool:
        """Forget an ending: it was answered, or is void, since the request is read again here or at
        another gateway. Return False if a newer ending has replaced it.
        """
        if self._owed.get(ending.request) is not ending:
            return False
        del self._owed[ending.request]
        self._tried.discard(ending.request)
        return True


def _is_stale(ending: Ending, reply: Reply) -> bool:
    if isinstance(reply, Exception):
        log.warning("request %s could not be ended: %s", ending.request, reply)
        return False
    return "stale" in texts(reply)
