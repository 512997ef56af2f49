"""Delivery of the notices in a worker's inbox to its tasks."""

import logging

from fleet.control.notices import (
    ChunkNotice,
    CreditNotice,
    EndNotice,
    FreeNotice,
    LoggedNotice,
    MovedNotice,
    Notice,
    OrderNotice,
    PromotionNotice,
    RelocationNotice,
    TakenNotice,
    UnreadableNotice,
    WalkNotice,
)
from fleet.core.clock import now_us
from fleet.core.ids import EdgeName, RequestId, WorkerId
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.task.inbound import InboundEdge

log = logging.getLogger(__name__)


class Inbox:
    """Delivers the notices in a worker's inbox to the worker's tasks. A notice about a task that
    this worker no longer owns is ignored.
    """

    def __init__(self, worker: WorkerId, parts: WorkerParts) -> None:
        self._worker, self._tasks = worker, parts.tasks
        self._offers, self._availability = parts.offers, parts.availability

    def deliver(self, notice: Notice) -> None:
        match notice:
            case ChunkNotice(chunk=chunk, location=location):
                task = self._tasks.get(chunk.request)
                if task is not None and chunk.edge in task.inbound:
                    task.receipts.arrived(chunk.edge, now_us(), chunk.produced_us)
                    task.inbound[chunk.edge].put(chunk, location)
            case CreditNotice(request=request, edge=edge, consumed=consumed):
                task = self._tasks.get(request)
                if task is not None:
                    task.add_credit(edge, consumed)
            case RelocationNotice(request=request, edge=edge, index=index, location=location):
                if (inbound := self._inbound(request, edge)) is not None:
                    inbound.relocate(index, location)
            case WalkNotice(request=request, edge=edge, from_index=index, walk=walk):
                if (inbound := self._inbound(request, edge)) is not None:
                    inbound.assign_walk(index, walk)
            case TakenNotice():
                self._release_redelivered(notice)
            case OrderNotice(order=order):
                self._availability.apply_order(order)
            case PromotionNotice():
                self._availability.promote(self._worker)
            case FreeNotice(request=request):
                self._offers.free(request)
            case EndNotice(request=request, state=state):
                self._tasks.drop(request, keep_cached=state == "aborted")
            # gateways receive the first, the link handles the others
            case MovedNotice() | LoggedNotice() | UnreadableNotice():
                return

    def _inbound(self, request: RequestId, edge: EdgeName) -> InboundEdge | None:
        task = self._tasks.get(request)
        return task.inbound.get(edge) if task is not None else None

    def _release_redelivered(self, notice: TakenNotice) -> None:
        """End a task in this worker after an operator has redelivered the task; the next owner
        continues from the logs.
        """
        task = self._tasks.get(notice.request)
        if task is not None and task.stage == notice.stage and task.epoch < notice.epoch:
            log.warning(
                "request %s is redelivered: %s no longer owns it", notice.request, self._worker
            )
            self._tasks.restart_elsewhere(task)
