"""One request as its gateway sees it: client-edge chunks in index order per edge, acknowledged as they are taken."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, cast

import redis.asyncio
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import pairs, run_async, text
from fleet.control.notices import EndNotice
from fleet.core.chunk import Chunk, decode_chunk
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, NotFound, RedisUnreachable, from_code
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, WorkerId
from fleet.core.receipts import TOLD as RECEIVED
from fleet.core.receipts import Receipts
from fleet.core.request import RequestSpec

log = logging.getLogger(__name__)


class ClientStream:
    """Iterate it for chunks; iteration ends when every requested edge is final. Abort it when the client leaves.

    Invariants: per edge, chunks come in index order, each once. Raises, while iterating: the FleetError the request ended with.
    """

    def __init__(
        self, spec: RequestSpec, blob: bytes | None, config: FleetConfig, client: redis.asyncio.Redis, keep: scripts.Retention
    ) -> None:
        self.request_id: RequestId = spec.id
        self.spec, self.blob = spec, blob
        self.epoch = Epoch(0)
        self.gateway = WorkerId("")
        self._receipts = Receipts()
        self.on_close: Callable[[], object] = lambda: None
        self.on_lost: Callable[[], Awaitable[object]] = self._fail_as_lost
        self._redis, self._keep = client, keep
        graph = config.graph_declaration()
        self._strides = {edge: config.ack_stride_of(graph.edge(edge)) for edge in spec.outputs}
        self._sources = {edge: graph.edge(edge).source for edge in spec.outputs}
        self._next = dict.fromkeys(spec.outputs, 0)
        self._consumed = dict.fromkeys(spec.outputs, 0)
        self._acked = dict.fromkeys(spec.outputs, 0)
        self._early: dict[tuple[EdgeName, int], Chunk] = {}
        self._ready: deque[Chunk] = deque()
        self._open: set[EdgeName] = set(spec.outputs)
        self._error: FleetError | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._next_before = dict(self._next)

    def put(self, chunk: Chunk, *, from_log: bool = False) -> None:
        """A chunk arrived, in whatever order; repeats are dropped. `from_log`: it may have lain there for long."""
        if chunk.edge not in self._next:
            return
        if chunk.index < self._next[chunk.edge]:
            # Made again because Redis lost it, and perhaps our credit for it: `catch_up` gives that again.
            self._acked[chunk.edge] = min(self._acked[chunk.edge], chunk.index)
            return
        if not from_log and (chunk.edge, chunk.index) not in self._early:
            self._receipts.arrived(chunk.edge, now_us(), chunk.made_us)
        self._early.setdefault((chunk.edge, chunk.index), chunk)
        while (ready := self._early.pop((chunk.edge, self._next[chunk.edge]), None)) is not None:
            self._next[chunk.edge] += 1
            self._ready.append(ready)
        self._wake.set()

    def held_by(self, gateway: WorkerId, epoch: Epoch) -> None:
        """The right to acknowledge and to abort is that of this incarnation of the gateway, at this epoch."""
        self.gateway, self.epoch = gateway, epoch

    def is_astray(self, gateway: WorkerId) -> bool:
        """Whether its right was that of another incarnation than `gateway`, and the answer is still wanted."""
        return bool(self.epoch) and self.gateway != gateway and self._error is None

    def ended(self, notice: EndNotice) -> None:
        """The request has ended; anything but `finished` is an error for whoever still listens."""
        if notice.state != "finished":
            self.fail(from_code(notice.code, notice.message or f"the request was {notice.state}", notice.param or None))

    def fail(self, error: FleetError) -> None:
        self._error = self._error or error
        self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if not self._open:
                await self._close()
                raise StopAsyncIteration
            if self._error is not None:
                await self._close()
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        chunk = self._ready.popleft()
        if chunk.final:
            self._open.discard(chunk.edge)
        await self._ack(chunk)
        return chunk

    async def _ack(self, chunk: Chunk) -> None:
        """Give credit back in strides. One that Redis did not take is given with the next, or by `catch_up`."""
        self._consumed[chunk.edge] = chunk.index + 1
        if chunk.final or self._consumed[chunk.edge] - self._acked[chunk.edge] >= self._strides[chunk.edge]:
            await self._send_acks()

    async def _send_acks(self) -> None:
        due = [edge for edge, consumed in self._consumed.items() if consumed > self._acked[edge]]
        if not due:
            return
        sent = {edge: self._consumed[edge] for edge in due}
        acks = [self._ack_of(edge, sent[edge], delivered=not self._open and edge == due[-1]) for edge in due]
        try:
            await asyncio.gather(*self._story_of(acks), run_async(self._redis, scripts.ack(acks)))
        except RedisError as error:
            log.warning("credit for %s could not be given back: %s", self.request_id, error)
            return
        self._acked |= sent

    def _story_of(self, acks: Sequence[scripts.Ack]) -> list[Awaitable[object]]:
        """With the last of them, how the chunks came. It overtakes the acknowledgement, or is lost: nobody waits for it."""
        line = self._receipts.line(self.gateway) if any(ack.delivered for ack in acks) else None
        if line is None:
            return []
        name = f"{RECEIVED}:{self.epoch}"
        return [run_async(self._redis, scripts.tell(self.request_id, CLIENT, self.epoch, name, line))]

    def _ack_of(self, edge: EdgeName, consumed: int, *, delivered: bool) -> scripts.Ack:
        return scripts.Ack(
            request=self.request_id, stage=CLIENT, epoch=self.epoch, edge=edge, consumed=consumed,
            producer=self._sources[edge], delivered=delivered,
        )  # fmt: skip

    def moved(self) -> bool:
        """Whether each open edge has brought a chunk since this was last asked: then no notice can have been lost."""
        before, self._next_before = self._next_before, dict(self._next)
        return bool(self._open) and all(self._next[edge] > before[edge] for edge in self._open)

    async def catch_up(self) -> None:
        """Read from the logs what no notice brought, and give the credit that is still owed."""
        await self._learn_credit()
        await self._send_acks()
        if self._closed:
            self._forget_when_square()
            return
        for edge in list(self._open):
            first = f"{self._next[edge] + 1}-0"
            entries = await self._redis.xrange(keys.edge(self.request_id, edge), min=first)
            for _, raw in cast("list[tuple[bytes, object]]", entries):
                self.put(decode_chunk(pairs(raw)["h"]), from_log=True)
        await self._learn_end()

    async def _learn_credit(self) -> None:
        """A Redis that lost its last writes may know of less than was given, and the producer waits for it."""
        edges = list(self._acked)
        known = await self._redis.hmget(keys.task(self.request_id, CLIENT), [f"consumed:{edge}" for edge in edges])
        for edge, consumed in zip(edges, known, strict=True):
            self._acked[edge] = min(self._acked[edge], int(consumed or 0))

    @property
    def told_nothing(self) -> bool:
        """Whether the client has got no chunk yet."""
        return not any(self._next.values())

    async def _fail_as_lost(self) -> None:
        self.fail(RedisUnreachable("Redis lost the request; try again"))

    async def _learn_end(self) -> None:
        fields = await self._redis.hmget(keys.request(self.request_id), ["state", "code", "message", "param"])
        state, code, message, param = (text(field) for field in fields)
        if state == "finished" or not (state or self.epoch):
            await self._learn_what_is_kept()
        elif not state:
            await self.on_lost()
        elif state in ("failed", "aborted"):
            notice = EndNotice(request=self.request_id, state=state, code=code, message=message, param=param)
            self.ended(notice)

    async def _learn_what_is_kept(self) -> None:
        """An answer is finished once all of it was told, so what its logs have no more will never come."""
        complete = {chunk.edge for chunk in self._ready if chunk.final}
        awaited = [keys.edge(self.request_id, edge) for edge in self._open - complete]
        if awaited and await self._redis.exists(*awaited) < len(awaited):
            gone = f"the answer of {self.request_id} has ended, and its sound is kept for a minute after that; ask again"
            self.fail(NotFound(gone, param="request_id"))

    def raise_if_gone(self) -> None:
        """Raises: NotFound if the answer has ended and is no longer kept whole."""
        if isinstance(self._error, NotFound):
            raise self._error

    async def abort(self, reason: str) -> None:
        """Stop everything for this request, unless it has ended or another gateway holds it now. Idempotent.

        Raises: RedisUnreachable; the conductor aborts what a gateway that cannot renew its lease held.
        """
        if self._closed:
            return
        await self._close()
        try:
            await run_async(self._redis, scripts.abort(self.request_id, self.epoch, reason, self._keep))
        except RedisError as error:
            raise RedisUnreachable(f"Redis does not answer ({error})") from error

    async def _close(self) -> None:
        self._closed = True
        self._forget_when_square()

    def _forget_when_square(self) -> None:
        """A stream that still owes credit stays known, so that `catch_up` gives it: without it the request would never end."""
        if self._error is not None or self._open or self._consumed == self._acked:
            self.on_close()
