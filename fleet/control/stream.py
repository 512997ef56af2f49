"""One request as its gateway sees it: client-edge chunks in order per edge, each row once, acknowledged as they are taken."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Self, cast

import redis.asyncio
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.client_edge import ClientEdge
from fleet.control.connect import pairs, run_async, text
from fleet.control.notices import EndNotice
from fleet.core.chunk import Chunk, decode_chunk
from fleet.core.clock import now_us
from fleet.core.errors import ChunkOrderError, FleetError, NotFound, RedisUnreachable, from_code
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, WorkerId
from fleet.core.receipts import RECEIVED, Receipts
from fleet.core.request import RequestSpec

log = logging.getLogger(__name__)


class ClientStream:
    """Iterate it for chunks; iteration ends when every requested edge is final. Abort it when the client leaves.

    Invariants: per edge, rows come in order, each once; so do chunks, unless Redis lost some that were told and they were cut
    otherwise when made again. Raises, while iterating: the FleetError the request ended with.
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
        self.on_unheard: Callable[[], object] = lambda: None
        self._redis, self._keep = client, keep
        graph = config.graph_declaration()
        edges = [graph.edge(name) for name in spec.outputs]
        self._edges = {edge.name: ClientEdge(edge.name, edge.source, config.ack_stride_of(edge)) for edge in edges}
        self._ready: deque[Chunk] = deque()
        self._error: FleetError | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._next_before = dict.fromkeys(self._edges, 0)

    def put(self, chunk: Chunk, *, from_log: bool = False) -> None:
        """A chunk arrived, in whatever order; repeats are dropped. `from_log`: it may have lain there for long."""
        edge = self._edges.get(chunk.edge)
        if edge is None or not edge.wants(chunk):
            return
        if not from_log:
            self._receipts.arrived(chunk.edge, now_us(), chunk.made_us)
        self._ready.extend(edge.put(chunk))
        self._wake.set()

    def held_by(self, gateway: WorkerId, epoch: Epoch) -> None:
        """The right to acknowledge and to abort is that of this incarnation of the gateway, at this epoch."""
        self.gateway, self.epoch = gateway, epoch

    def is_detached(self, gateway: WorkerId) -> bool:
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
        while True:
            while not self._ready:
                if not self._open():
                    await self._close()
                    raise StopAsyncIteration
                if self._error is not None:
                    await self._close()
                    raise self._error
                self._wake.clear()
                await self._wake.wait()
            untold = await self._take(self._ready.popleft())
            if untold is not None:
                return untold

    def _open(self) -> list[ClientEdge]:
        return [edge for edge in self._edges.values() if not edge.ended]

    async def _take(self, chunk: Chunk) -> Chunk | None:
        """What of it is new to the client. One that was told before is only acknowledged."""
        edge = self._edges[chunk.edge]
        try:
            untold = edge.tell(chunk)
        except FleetError as error:
            self._ready.clear()
            self.fail(error)
            return None
        if edge.ended or edge.consumed - edge.acked >= edge.stride:
            await self._send_acks()
        return untold

    async def _send_acks(self) -> None:
        """Give credit back. What Redis did not take is given with the next, or by `catch_up`."""
        due = [edge for edge in self._edges.values() if edge.consumed > edge.acked]
        if not due:
            return
        sent = [(edge, edge.consumed) for edge in due]
        delivered = not self._open()
        acks = [self._ack_of(edge, delivered=delivered and edge is due[-1]) for edge in due]
        try:
            await asyncio.gather(*self._story_of(acks), run_async(self._redis, scripts.ack(acks)))
        except RedisError as error:
            log.warning("credit for %s could not be given back: %s", self.request_id, error)
            return
        for edge, consumed in sent:
            edge.acked = min(consumed, edge.consumed)  # it may be followed anew by now

    def _story_of(self, acks: Sequence[scripts.Ack]) -> list[Awaitable[object]]:
        """With the last of them, how the chunks came. It overtakes the acknowledgement, or is lost: nobody waits for it."""
        line = self._receipts.line(self.gateway) if any(ack.delivered for ack in acks) else None
        if line is None:
            return []
        name = f"{RECEIVED}:{self.epoch}"
        return [run_async(self._redis, scripts.set_task_metadata(self.request_id, CLIENT, self.epoch, name, line))]

    def _ack_of(self, edge: ClientEdge, *, delivered: bool) -> scripts.Ack:
        return scripts.Ack(
            request=self.request_id, stage=CLIENT, epoch=self.epoch, edge=edge.name, consumed=edge.consumed,
            producer=edge.source, delivered=delivered,
        )  # fmt: skip

    def moved(self) -> bool:
        """Whether each open edge has brought a chunk since this was last asked: then no notice can have been lost."""
        before, self._next_before = self._next_before, {edge.name: edge.next for edge in self._edges.values()}
        open_ = self._open()
        return bool(open_) and all(edge.next > before[edge.name] and not edge.diverged for edge in open_)

    async def catch_up(self) -> None:
        """Read from the logs what no notice brought, and give the credit that is still owed."""
        epochs = await self._learn_credit()
        for edge in self._open():
            await self._compare(edge, epochs[edge.name])
        await self._send_acks()
        if self._closed:
            self._forget_when_square()
            return
        for edge in self._open():
            await self._read_log(edge)
        await self._learn_end()

    async def _read_log(self, edge: ClientEdge) -> None:
        chunks = await self._logged(edge, edge.next)
        if any(after.first_row != before.first_row + before.num_rows for before, after in pairwise(chunks)):
            self.fail(ChunkOrderError(f"edge {edge.name}: its log does not follow on itself; do all processes have one version?"))
            return
        for chunk in chunks:
            self.put(chunk, from_log=True)

    async def _logged(self, edge: ClientEdge, first: int, last: int | None = None) -> list[Chunk]:
        """The chunks of these indices, which the log names by one more."""
        end = "+" if last is None else f"{last + 1}-0"
        entries = await self._redis.xrange(keys.edge(self.request_id, edge.name), min=f"{first + 1}-0", max=end)
        return [decode_chunk(pairs(raw)["h"]) for _, raw in cast("list[tuple[bytes, object]]", entries)]

    async def _learn_credit(self) -> dict[EdgeName, Epoch]:
        """A Redis that lost its last writes may know of less than was given, and the producer waits for it.

        Returns the epoch of the task that writes each edge.
        """
        edges = list(self._edges.values())
        pipe = self._redis.pipeline(transaction=False)
        pipe.hmget(keys.task(self.request_id, CLIENT), [f"consumed:{edge.name}" for edge in edges])
        for edge in edges:
            pipe.hget(keys.task(self.request_id, edge.source), "epoch")
        known, *epochs = cast("list[object]", await pipe.execute())
        for edge, consumed in zip(edges, cast("list[bytes | None]", known), strict=True):
            edge.acked = min(edge.acked, int(consumed or 0))
        return {edge.name: Epoch(int(text(epoch) or 0)) for edge, epoch in zip(edges, epochs, strict=True)}

    async def _compare(self, edge: ClientEdge, epoch: Epoch) -> None:
        """Whoever writes the log since `epoch` began where it ended then: before our last chunk, if Redis lost that."""
        if epoch != edge.checked:
            edge.drop_early()  # it may be lost as well; if not, it is read anew
            count, last = edge.next, edge.epoch
            if count and epoch != last:
                found = await self._logged(edge, count - 1, count - 1)
                edge.diverged |= not found or found[0].epoch != last
            edge.checked = epoch
        if edge.diverged and not edge.ended:
            log.warning("redis lost chunks of %s that were told; edge %s is followed anew", self.request_id, edge.name)
            self._ready = deque(chunk for chunk in self._ready if chunk.edge != edge.name)
            edge.begin_again()

    @property
    def told_nothing(self) -> bool:
        """Whether the client has got no chunk yet."""
        return not any(edge.next or edge.told for edge in self._edges.values())

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
        awaited = [keys.edge(self.request_id, edge.name) for edge in self._open() if edge.name not in complete]
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

    def run_on(self) -> None:
        """Leave the rest of the answer to the gateway, which takes it until a client asks for it (`FleetClient.resume`).

        For `web.send_timeout_s` at most, or clients that read nothing could occupy workers with answers of any length.
        """
        if not self._closed:
            self.on_unheard()

    async def discard_rest(self, patience_s: float | None) -> None:
        """Acknowledge the rest of the answer, which its log keeps. Abort what takes longer than `patience_s`; None: nothing."""
        try:
            try:
                async with asyncio.timeout(patience_s):
                    async for _ in self:
                        continue
            except TimeoutError:
                await self.abort(f"its client read nothing, and did not come back for {patience_s:g} s (web.send_timeout_s)")
        except FleetError as error:
            log.info("request %s, which has no client, ended with: %s", self.request_id, error.message)

    async def _close(self) -> None:
        self._closed = True
        self._forget_when_square()

    def _forget_when_square(self) -> None:
        """A stream that still owes credit stays known, so that `catch_up` gives it: without it the request would never end."""
        square = all(edge.consumed == edge.acked for edge in self._edges.values())
        if self._error is not None or self._open() or square:
            self.on_close()
