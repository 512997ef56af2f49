"""From released drafts to chunks on the wire: tensors inline when small, published for pulling when remote. Knows no engine."""

from collections.abc import Callable, Iterable

import numpy as np

from fleet.control.scripts import Append
from fleet.core.chunk import Chunk, Location, WireTensor
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, TransferError
from fleet.core.events import ChunkAppended
from fleet.core.ids import RequestId, WorkerId
from fleet.transfer.base import Transfer
from fleet.worker.outbound import Draft, OutboundEdge
from fleet.worker.task import Task

INLINE_BYTES = 1024
"""A remote tensor this small rides in its header all the same: a pull costs more than the bytes."""


class Sender:
    """Turns drafts into appends, in order per task. A task whose tensors find no room waits; the others go on."""

    def __init__(self, transfer: Transfer, worker: WorkerId) -> None:
        self._transfer, self._worker = transfer, worker
        self._published: set[RequestId] = set()
        self._blocked: set[RequestId] = set()

    def collect(self, tasks: Iterable[Task], fail: Callable[[Task, FleetError], None]) -> list[Append]:
        """Every chunk that can go now."""
        appends: list[Append] = []
        self._blocked.clear()
        for task in list(tasks):
            appends += self._collect_one(task, fail)
        return appends

    def _collect_one(self, task: Task, fail: Callable[[Task, FleetError], None]) -> list[Append]:
        ready: list[Append] = []
        for position, (edge, draft) in enumerate(task.unsent):
            try:
                tensors, location = self._tensors(task, edge, draft)
            except TransferError as error:
                if not self._others_hold_room(task.request):
                    fail(task, error)
                    return []
                self._blocked.add(task.request)
                task.unsent = task.unsent[position:]
                return ready
            last = position == len(task.unsent) - 1 and task.all_ended()
            ready.append(self._append(task, edge, draft, tensors, location, finish=last))
        task.unsent = []
        return ready

    def _append(
        self, task: Task, edge: OutboundEdge, draft: Draft, tensors: dict[str, WireTensor], location: Location, *, finish: bool
    ) -> Append:
        chunk = Chunk(
            request=task.request,
            edge=edge.edge.name,
            index=draft.index,
            epoch=task.epoch,
            tensors=tensors,
            walk=draft.walk,
            producer_walk=draft.producer_walk,
            boundary=draft.boundary,
            final=draft.final,
            made_us=now_us(),
        )
        told = draft.index == 0 or draft.boundary or draft.final
        event = ChunkAppended(
            request=task.request,
            edge=edge.edge.name,
            index=draft.index,
            boundary=draft.boundary,
            producer_walk=draft.producer_walk or None,
            ordinal=draft.ordinal,
            final=draft.final,
        )
        return Append(
            stage=task.stage,
            consumer=edge.edge.target,
            chunk=chunk,
            location=location,
            event=event if told else None,
            finish=finish,
            num_items=draft.num_items,
        )

    def _tensors(self, task: Task, edge: OutboundEdge, draft: Draft) -> tuple[dict[str, WireTensor], Location]:
        """Raises: TransferError when a remote tensor finds no room."""
        tensors: dict[str, WireTensor] = {}
        location: Location = {}
        for name, array in draft.arrays.items():
            dtype = edge.edge.tensors.get(name, str(array.dtype))
            data = np.ascontiguousarray(array, dtype=dtype).tobytes()
            if name not in edge.edge.remote or len(data) <= INLINE_BYTES:
                tensors[name] = WireTensor(dtype=dtype, shape=array.shape, data=data)
                continue
            wire = self._transfer.publish(task.request, dtype, array.shape, data)
            self._published.add(task.request)
            tensors[name] = WireTensor(dtype=dtype, shape=array.shape, data=wire.data)
            if wire.ref is not None:
                location[name] = wire.ref
        return tensors, location

    def _others_hold_room(self, request: RequestId) -> bool:
        """Whether waiting can help: another request's slots will be freed."""
        return any(other != request for other in self._published)

    def blocked(self, task: Task) -> bool:
        return task.request in self._blocked

    def waiting(self) -> bool:
        return bool(self._blocked)

    def published(self, request: RequestId) -> bool:
        return request in self._published

    def release(self, request: RequestId) -> None:
        if request in self._published:
            self._transfer.release(request)
            self._published.discard(request)
