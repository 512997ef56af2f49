"""From released drafts of chunks to chunks on the wire: small tensors are sent inline, larger
remote ones are published to be pulled. Knows no engine.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from fleet.control.scripts import Append, Relocation
from fleet.core.chunk import Chunk, Location, TensorRef, WireTensor
from fleet.core.clock import now_us
from fleet.core.errors import TransferError
from fleet.core.events import ChunkAppended
from fleet.core.ids import EdgeName, Epoch, RequestId, WorkerId
from fleet.telemetry.counts import SentCounts
from fleet.transfer.base import Transfer
from fleet.worker.task.outbound import Draft, OutboundEdge
from fleet.worker.task.task import Task, TaskPhase

log = logging.getLogger(__name__)

INLINE_BYTES = 1024
"""Largest size of a remote tensor that is sent inline: a pull costs more than the bytes."""
_Key = tuple[EdgeName, int, str]
"""Edge, index and name of a published tensor."""


class Sender:
    """Turns a task's chunk drafts into log appends, in order.

    A task that this worker owned before, and had to give up, finds its logged tensors where they
    are: they are not published a second time.

    Arena slots are freed when requests end, so requests that each hold part of a full arena could
    block each other indefinitely. Therefore a tensor that finds no room in the arena is sent
    inline, which is slower; on an edge that never sends it inline, the request fails.
    """

    def __init__(self, transfer: Transfer, worker: WorkerId) -> None:
        self._transfer, self._worker = transfer, worker
        self._published: dict[RequestId, dict[_Key, tuple[Epoch, TensorRef]]] = {}
        self._sent = defaultdict[str, SentCounts](SentCounts)

    def collect(self, task: Task, appends: list[Append], relocations: list[Relocation]) -> None:
        """Add a task's unsent chunks to `appends`, and new locations of logged chunks whose tensors
        were recomputed to `relocations`; clear `task.unsent`. If an error is raised, all three are
        unchanged.
        """
        new_locations = [
            self._relocation(task, edge, draft) for edge, draft in task.unsent if draft.is_logged
        ]
        appends += self._appends(
            task, [(edge, draft) for edge, draft in task.unsent if not draft.is_logged]
        )
        relocations += new_locations
        task.unsent = []

    def _relocation(self, task: Task, edge: OutboundEdge, draft: Draft) -> Relocation:
        location: Location = {}
        for name, array in draft.arrays.items():
            wire, data = _inline(edge, name, array)
            if not _is_pulled(edge, name, data):  # it is in the logged header
                continue
            at = (edge.edge.name, draft.index, name)
            epoch, ref = self._published.get(task.request, {}).get(at, (None, None))
            if ref is None or epoch != draft.logged_at:  # else these are the rows in the log
                ref = self._publish(task, edge, draft, name, wire, data).ref
            location[name] = ref or data
        return Relocation(
            request=task.request,
            stage=task.stage,
            epoch=task.epoch,
            edge=edge.edge.name,
            consumer=edge.edge.target,
            index=draft.index,
            location=location,
        )

    def _appends(self, task: Task, unsent: Sequence[tuple[OutboundEdge, Draft]]) -> list[Append]:
        appends: list[Append] = []
        for position, (edge, draft) in enumerate(unsent):
            tensors, location = self._tensors(task, edge, draft)
            chunk = Chunk(
                request=task.request,
                edge=edge.edge.name,
                index=draft.index,
                epoch=task.epoch,
                tensors=tensors,
                walk=draft.walk,
                producer_walk=draft.producer_walk,
                boundary=draft.boundary,
                ordinal=draft.ordinal,
                final=draft.final,
                produced_us=now_us(),
                first_row=draft.first_row,
                figures=draft.figures,
            )
            append = Append(
                stage=task.stage,
                consumer=edge.edge.target,
                chunk=chunk,
                location=location,
                event=ChunkAppended.of(chunk)
                if chunk.index == 0 or chunk.boundary or chunk.final
                else None,
                finish=position == len(unsent) - 1 and task.all_ended(),
                num_items=draft.num_items,
                asks=chunk.boundary and not edge.writes_markers,
            )
            appends.append(append)
            sent = self._sent[edge.edge.name]
            sent.num_chunks += 1
            sent.num_bytes += sum(array.nbytes for array in draft.arrays.values())
        return appends

    def counts(self, tasks: Iterable[Task]) -> dict[str, SentCounts]:
        """Return, by edge, the chunks and bytes sent since this incarnation began, and the number
        of `tasks` that wait now for credit on the edge.
        """
        waiting = Counter[str](
            wait.edge
            for task in tasks
            if task.phase is TaskPhase.OUT_OF_CREDIT
            for wait in task.credit_waits()
        )
        for edge in {*self._sent, *waiting}:
            self._sent[edge].num_waiting = waiting[edge]
        return self._sent

    def _tensors(
        self, task: Task, edge: OutboundEdge, draft: Draft
    ) -> tuple[dict[str, WireTensor], Location]:
        tensors: dict[str, WireTensor] = {}
        location: Location = {}
        for name, array in draft.arrays.items():
            wire, data = _inline(edge, name, array)
            if _is_pulled(edge, name, data):
                wire = self._publish(task, edge, draft, name, wire, data)
            if wire.ref is not None:
                location[name] = wire.ref
                wire = WireTensor(dtype=wire.dtype, shape=array.shape, data=wire.data)
            tensors[name] = wire
        return tensors, location

    def _publish(
        self,
        task: Task,
        edge: OutboundEdge,
        draft: Draft,
        name: str,
        inline: WireTensor,
        data: bytes,
    ) -> WireTensor:
        request = task.request
        try:
            wire = self._transfer.publish(request, inline.dtype, inline.shape, data)
        except TransferError as error:
            if edge.edge.never_inline:
                raise
            log.warning("%d bytes of %s are sent through Redis: %s", len(data), request, error)
            return inline
        of_request = self._published.setdefault(request, {})
        if wire.ref is not None:
            at = (edge.edge.name, draft.index, name)
            of_request[at] = (draft.logged_at or task.epoch, wire.ref)
        return wire

    def published(self, request: RequestId) -> bool:
        return request in self._published

    def release(self, request: RequestId) -> None:
        if request in self._published:
            self._transfer.release(request)
            del self._published[request]


def _is_pulled(edge: OutboundEdge, name: str, data: bytes) -> bool:
    return name in edge.edge.remote and (
        len(data) > INLINE_BYTES or (edge.edge.never_inline and bool(data))
    )


def _inline(edge: OutboundEdge, name: str, array: np.ndarray) -> tuple[WireTensor, bytes]:
    dtype = edge.edge.tensors.get(name) or str(array.dtype)  # which is slow
    data = np.ascontiguousarray(array, dtype=dtype).tobytes()
    return WireTensor(dtype=dtype, shape=array.shape, data=data), data
