"""A gateway's stream of one request's answer: delivers the chunks of its client edges, in order per
edge, each row once, and acknowledges delivered chunks.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.client_edge import ClientEdge
from fleet.control.connect import run_async, text, texts
from fleet.control.endings import Abort, EndingsOwed, FinalAcks
from fleet.control.logged_chunks import chunks_of
from fleet.control.notices import EndNotice
from fleet.control.outage import is_away
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.errors import (
    ChunkOrderError,
    FleetError,
    NotFound,
    ResumedElsewhere,
    from_code,
)
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, WorkerId
from fleet.core.request import RequestSpec
from fleet.telemetry.counts import Receipts

log = logging.getLogger(__name__)


class ClientStream:
    """Iterator over the chunks of one answer; ends when every requested edge is final. Abort it
    when the client leaves.

    Invariants: per edge, rows arrive in order, each once. Chunks do too, unless Redis lost
    delivered chunks and the recomputed rows were divided differently. Raises, while iterating: the
    FleetError of the request.
    """

    def __init__(
        self,
        spec: RequestSpec,
        blob: bytes | None,
        config: FleetConfig,
        client: Redis,
        endings: EndingsOwed,
    ) -> None:
        self.request_id: RequestId = spec.id
        self.spec = spec
        self.blob = blob
        self.client_key = ""
        self.epoch = Epoch(0)
        self.gateway = WorkerId("")
        self._receipts = Receipts()
        self.on_close: Callable[[], object] = lambda: None
        self.on_stale: Callable[[], Awaitable[object]] = self._supersede
        """Called when Redis lists another reader of the answer, or no reader, or does not have the
        request: attaches this stream again, restores the request, or ends the stream.
        """
        self.on_unread: Callable[[], object] = lambda: None
        self.was_read = False
        """True if a client may have received a part of this answer from an earlier stream."""
        self._redis = client
        self._endings = endings
        graph = config.graph_declaration()
        edges = [graph.edge(name) for name in spec.outputs]
        self._edges = {
            edge.name: ClientEdge(edge.name, edge.source, config.credits_of(edge)) for edge in edges
        }
        self._ready: deque[Chunk] = deque()
        self._error: FleetError | None = None
        self._wake = asyncio.Event()
        self._closed = self._needs_no_acks = False
        self._next_before = dict.fromkeys(self._edges, 0)

    def put(self, chunk: Chunk, *, from_log: bool = False) -> None:
        """Add a chunk that arrived, in any order; repeated chunks are dropped. `from_log`: True for
        a chunk read from the log, whose latency is not counted.
        """
        if not self.wants(chunk.edge, chunk.index):
            return
        edge = self._edges[chunk.edge]
        if not from_log:
            self._receipts.arrived(chunk.edge, now_us(), chunk.produced_us)
        self._ready.extend(edge.put(chunk))
        self._wake.set()

    def wants(self, edge: EdgeName, index: int) -> bool:
        """Return True if the client is to receive this chunk of `edge` and it has not arrived."""
        return edge in self._edges and self._edges[edge].wants(index)

    def held_by(self, gateway: WorkerId, epoch: Epoch) -> None:
        """Set the gateway id and the epoch under which the stream acknowledges and aborts."""
        self.gateway = gateway
        self.epoch = epoch

    def restored_by(self, gateway: WorkerId, epoch: Epoch) -> None:
        """Set the gateway id and epoch as `held_by` does, and read the answer again from its start,
        since Redis had lost the request. Rows that the client has are not delivered again.
        """
        self.held_by(gateway, epoch)
        self._needs_no_acks = False
        self._ready.clear()
        for edge in self._edges.values():
            edge.begin_again()

    def stop_acks(self) -> None:
        """Send no more acknowledgements: the request has ended in Redis."""
        self._needs_no_acks = True

    def is_detached(self, gateway: WorkerId) -> bool:
        """Return True if this stream has not failed and is held under another id than `gateway`."""
        return bool(self.epoch) and self.gateway != gateway and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def ended(self, notice: EndNotice) -> None:
        """Record the end of the request. Unless its state is `finished`, the stream fails with the
        error of the notice.
        """
        if notice.state != "finished":
            self.fail(
                from_code(
                    notice.code,
                    notice.message or f"the request was {notice.state}",
                    notice.param or None,
                )
            )

    def fail(self, error: FleetError) -> None:
        self._error = self._error or error
        self._wake.set()

    def _give_up(self, error: FleetError) -> None:
        """Fail, and owe the abort of the request, which may run on."""
        self.fail(error)
        if self.epoch:
            abort = Abort(request=self.request_id, epoch=self.epoch, reason=error.message)
            self._endings.owe(abort)

    def supersede(self) -> None:
        """End this stream because a newer stream continues the answer. Later reads raise
        ResumedElsewhere, and `abort` does nothing.
        """
        self._closed = True
        self._ready.clear()
        self._error = ResumedElsewhere.of(self.request_id)
        self._wake.set()

    async def _supersede(self) -> None:
        self.supersede()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            while not self._ready:
                if not self._open():
                    self._close()
                    raise StopAsyncIteration
                if self._error is not None:
                    self._close()
                    raise self._error
                self._wake.clear()
                await self._wake.wait()
            new_part = await self._consume(self._ready.popleft())
            if new_part is not None:
                return new_part

    def _open(self) -> list[ClientEdge]:
        return [edge for edge in self._edges.values() if not edge.ended]

    async def _consume(self, chunk: Chunk) -> Chunk | None:
        """Consume a chunk, and send an acknowledgement if due; the last chunk of the answer ends
        the delivery. Return the part that is new to the client; None if there is nothing new.
        """
        edge = self._edges[chunk.edge]
        try:
            new_part = edge.consume(chunk)
        except FleetError as error:
            self._ready.clear()
            self._give_up(error)
            return None
        if not self._open():
            await self._end_delivery()
        elif edge.is_ack_due():
            await self._send_acks()
        return new_part

    async def _end_delivery(self) -> None:
        """Close the stream, whose client has the whole answer; owe the final acknowledgements."""
        self._close()
        if self._needs_no_acks or isinstance(self._error, ResumedElsewhere):
            return
        edges = self._edges.values()
        acks = FinalAcks(
            request=self.request_id,
            epoch=self.epoch,
            consumed={edge.name: edge.consumed for edge in edges},
            producers={edge.name: edge.source for edge in edges},
            receipts=self._receipts.line(self.gateway),
        )
        await self._endings.settle(acks)

    async def _send_acks(self) -> None:
        """Send the acknowledgements that are due. After an error, the next call or `catch_up` sends
        them again.

        An outage of Redis is logged by the gateway, once, and not here for each of its answers.
        """
        try:
            if not await self._acknowledge():
                await self.on_stale()
                await self._acknowledge()
        except RedisError as error:
            if not is_away(error):
                log.warning(
                    "chunks of request %s could not be acknowledged (%s); it is tried again",
                    self.request_id,
                    error,
                )

    async def _acknowledge(self) -> bool:
        """Acknowledge consumed chunks. Return False if Redis refuses because the answer is held at
        another epoch.
        """
        due = [edge for edge in self._edges.values() if edge.consumed > edge.acked]
        if not due or isinstance(self._error, ResumedElsewhere):
            return True
        if self._needs_no_acks:
            for edge in due:
                edge.acked = edge.consumed
            return True
        sent = [(edge, edge.begin_ack()) for edge in due]
        acks = [
            scripts.Ack(
                request=self.request_id,
                stage=CLIENT,
                epoch=self.epoch,
                edge=edge.name,
                consumed=edge.consumed,
                producer=edge.source,
            )
            for edge in due
        ]
        answers = texts(await run_async(self._redis, scripts.ack(acks)))
        for (edge, consumed), answer in zip(sent, answers, strict=True):
            if answer != "stale":
                # its log may have been restarted meanwhile
                edge.acked = min(consumed, edge.consumed)
        return "stale" not in answers

    def moved(self) -> bool:
        """Return True if there are open edges and all of them have advanced since the last call of
        this method, which shows that no notice is missing.
        """
        before = self._next_before
        self._next_before = {edge.name: edge.next for edge in self._edges.values()}
        unfinished = self._open()
        return bool(unfinished) and all(
            edge.next > before[edge.name] and not edge.diverged for edge in unfinished
        )

    def position(self) -> scripts.StreamPosition | None:
        """Return the position up to which this stream has read the answer; None if `catch_up` is
        to be called without a comparison with Redis.
        """
        edges = self._edges.values()
        if (
            self._closed
            or not self.epoch
            or any(edge.diverged or edge.consumed > edge.acked for edge in edges)
        ):
            return None
        positions = [
            scripts.EdgePosition(
                edge.name, edge.source, edge.next, None if edge.ended else edge.checked, edge.acked
            )
            for edge in edges
        ]
        return scripts.StreamPosition(self.request_id, self.gateway, self.epoch, positions)

    async def catch_up(self) -> None:
        """Read chunks whose notices were lost from the logs, and send acknowledgements that are
        due.
        """
        epochs = await self._read_credit()
        for edge in self._open():
            await self._compare(edge, epochs[edge.name])
        await self._send_acks()
        if not self._closed:
            await self._read_logs()

    async def read_from_start(self) -> None:
        """Read the logs in one round trip, for a stream that has received no chunk, or only chunks
        whose notices have just arrived.
        """
        edges = self._open()
        pipe = self._redis.pipeline(transaction=False)
        for edge in edges:
            pipe.hget(keys.task(self.request_id, edge.source), "epoch")
        self._ask_logs(pipe, edges)
        replies = await pipe.execute()
        for edge, epoch in zip(edges, replies, strict=False):
            if not edge.next:  # else `catch_up` compares its last chunk with the log
                edge.checked = Epoch(int(text(epoch) or 0))
        await self._accept_logs(edges, replies[len(edges) :])

    async def _read_logs(self) -> None:
        """Read the new chunks of every open edge, and after them the request's state, in one round
        trip.
        """
        edges = self._open()
        pipe = self._redis.pipeline(transaction=False)
        self._ask_logs(pipe, edges)
        await self._accept_logs(edges, await pipe.execute())

    def _ask_logs(self, pipe: Pipeline, edges: Sequence[ClientEdge]) -> None:
        for edge in edges:
            pipe.xrange(keys.edge(self.request_id, edge.name), min=f"{edge.next + 1}-0")
        pipe.hmget(keys.request(self.request_id), ["state", "code", "message", "param"])

    async def _accept_logs(self, edges: Sequence[ClientEdge], replies: Sequence[Any]) -> None:
        *logs, state = replies
        for edge, log_reply in zip(edges, logs, strict=True):
            self._add_logged(edge, chunks_of(log_reply))
        await self._settle_state(*(text(field) for field in state))

    def _add_logged(self, edge: ClientEdge, chunks: list[Chunk]) -> None:
        if any(
            after.first_row != before.first_row + before.num_rows
            for before, after in pairwise(chunks)
        ):
            self._give_up(
                ChunkOrderError(
                    f"edge {edge.name}: its log does not follow on itself; do all processes "
                    "have one version?"
                )
            )
            return
        for chunk in chunks:
            self.put(chunk, from_log=True)

    async def _logged(self, edge: ClientEdge, index: int) -> list[Chunk]:
        """Read one chunk, whose entry id in the log is index + 1. Return an empty list if the log
        does not have it.
        """
        entry = f"{index + 1}-0"
        return chunks_of(
            await self._redis.xrange(keys.edge(self.request_id, edge.name), min=entry, max=entry)
        )

    async def _read_credit(self) -> dict[EdgeName, Epoch]:
        """Read from Redis which chunks are acknowledged, so that lost acknowledgements are sent
        again, and whether this stream is still listed as the answer's reader.

        Returns the epoch of each edge's producing task.
        """
        edges = list(self._edges.values())
        pipe = self._redis.pipeline(transaction=False)
        pipe.hmget(
            keys.task(self.request_id, CLIENT),
            ["epoch", "owner", "state", *(f"consumed:{edge.name}" for edge in edges)],
        )
        for edge in edges:
            pipe.hget(keys.task(self.request_id, edge.source), "epoch")
        (epoch, owner, state, *counts), *epochs = await pipe.execute()
        is_held = (text(epoch), text(owner)) == (str(self.epoch), self.gateway)
        if self.epoch and text(state) in ("running", "lost") and not is_held:
            await self.on_stale()
        for edge, consumed in zip(edges, counts, strict=True):
            edge.acked = min(edge.acked, int(consumed or 0))
        return {
            edge.name: Epoch(int(text(epoch) or 0))
            for edge, epoch in zip(edges, epochs, strict=True)
        }

    async def _compare(self, edge: ClientEdge, epoch: Epoch) -> None:
        """Restart an edge whose log has diverged. `epoch`: epoch of the producing task. A producer
        of a new epoch continues at the log's end, which is before the last received chunk if Redis
        lost writes.
        """
        if epoch != edge.checked:
            edge.drop_early()  # these may be lost too; if not, they are read again
            count, last = edge.next, edge.epoch
            if count and epoch != last:
                found = await self._logged(edge, count - 1)
                edge.diverged |= not found or found[0].epoch != last
            edge.checked = epoch
        if edge.diverged and not edge.ended:
            line = (
                "Redis lost delivered chunks of request %s; the log of edge %s is read again "
                "from its start"
            )
            log.warning(line, self.request_id, edge.name)
            self._ready = deque(chunk for chunk in self._ready if chunk.edge != edge.name)
            edge.begin_again()

    @property
    def is_undelivered(self) -> bool:
        """True if no client has received any chunk."""
        return not self.was_read and not any(
            edge.next or edge.rows_delivered for edge in self._edges.values()
        )

    async def _settle_state(self, state: str, code: str, message: str, param: str) -> None:
        """Act on the request's state and error as read from Redis. `state`: "" if Redis does not
        have the request.
        """
        if state == "finished" or not (state or self.epoch):
            await self._check_retained()
        elif not state:
            await self.on_stale()
        elif state in ("failed", "aborted"):
            notice = EndNotice(
                request=self.request_id, state=state, code=code, message=message, param=param
            )
            self.ended(notice)

    async def _check_retained(self) -> None:
        """Fail if a log is gone although chunks are missing: the answer is finished, so they will
        not be produced again.
        """
        complete = {chunk.edge for chunk in self._ready if chunk.final}
        awaited = [
            keys.edge(self.request_id, edge.name)
            for edge in self._open()
            if edge.name not in complete
        ]
        if awaited and await self._redis.exists(*awaited) < len(awaited):
            reason = (
                f"the answer of {self.request_id} has ended, and its audio is deleted "
                "after a minute; send a new request"
            )
            self.fail(NotFound(reason, param="request_id"))

    def raise_if_gone(self) -> None:
        """Raise NotFound if the answer has ended and is no longer retained whole."""
        if isinstance(self._error, NotFound):
            raise self._error

    async def abort(self, reason: str) -> None:
        """Abort the request, unless it has ended or another gateway holds it now. Idempotent. While
        Redis is away, the abort is owed.
        """
        if self._closed:
            return
        self._close()
        if self.epoch:
            abort = Abort(request=self.request_id, epoch=self.epoch, reason=reason)
            await self._endings.settle(abort)

    def run_on(self) -> None:
        """Let the gateway read the rest of the answer until a client resumes it
        (`GatewayRequests.resume`).

        After `web.send_timeout_s` the request is aborted, since clients that read nothing could
        otherwise occupy workers for a long time.
        """
        if not self._closed:
            self.on_unread()

    async def discard_rest(self, patience_s: float | None) -> None:
        """Read and acknowledge the rest of the answer, which its log retains. `patience_s`: seconds
        until the request is aborted; None: never.
        """
        try:
            await self._read_rest(patience_s)
        except FleetError as error:
            log.info(
                "request %s, which has no client, ended with: %s", self.request_id, error.message
            )

    async def _read_rest(self, patience_s: float | None) -> None:
        try:
            async with asyncio.timeout(patience_s):
                async for _ in self:
                    continue
        except TimeoutError:
            await self.abort(
                f"its client read nothing, and did not resume it within {patience_s:g} s "
                "(web.send_timeout_s)"
            )

    def _close(self) -> None:
        self._closed = True
        self.on_close()
