"""The writes of one round trip, in the order in which Redis must run them, and the handling of
their replies.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.core.errors import ChunkOrderError
from fleet.worker.context import WorkerContext
from fleet.worker.loop.hand_off_coordinator import HandOffCoordinator
from fleet.worker.loop.parking import Parking
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.task.pending_calls import PendingCall, ignore_reply, statistics_calls

URGENT = {"confirm", "fail"}
"""Names of scripts whose round trip reads from Redis without blocking: this worker waits for the
reply of `confirm`, and a client for the error that `fail` writes.
"""


class Outbox:
    """Collects the writes of the worker's parts for the next round trip. `add` queues further
    calls.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: WorkerParts,
        hand_offs: HandOffCoordinator,
        parking: Parking,
    ) -> None:
        self._worker, self._engine = context.worker, context.engine
        self._tasks = parts.tasks
        self._sender = parts.sender
        self._receiver = parts.receiver
        self._hand_offs, self._cached_sessions = hand_offs, parts.cached_sessions
        self._parking = parking
        self._queued: list[PendingCall] = []

    def add(self, calls: Sequence[PendingCall]) -> None:
        self._queued += calls

    def take(self) -> list[PendingCall]:
        """Return this iteration's calls in order: a task's chunks come before its hand-off, and its
        metadata before the chunk that ends it.
        """
        appends, relocations = self._collect_chunks()
        acks = [
            ack
            for task in self._tasks.values()
            if task.ack_due and task.inbound
            for ack in task.take_acks(self._engine.num_unread(task.request))
        ]
        calls: list[PendingCall] = [(scripts.ack(acks), ignore_reply)] if acks else []
        queued, self._queued = self._queued, []
        calls += queued + self._hand_offs.take_metadata_calls() + self._cached_sessions.take_calls()
        # Before the chunk that may end the task: after it, a consumer waiting for these tensors
        # would get no notice of them.
        calls += [(scripts.relocate(relocation), ignore_reply) for relocation in relocations]
        for append in appends:
            calls += (
                statistics_calls(self._tasks[append.chunk.request], self._worker)
                if append.finish
                else []
            )
        if appends:
            calls.append((scripts.append(appends), partial(self._settle_appends, appends)))
        calls += self._idle_reports()
        calls += [(scripts.fail(event), ignore_reply) for event in self._tasks.take_failures()]
        for task, edge in self._receiver.take_lost():
            calls.append(
                (
                    scripts.lose_tensors(
                        task.request, task.stage, task.epoch, task.producers[edge]
                    ),
                    ignore_reply,
                )
            )
        return calls + self._hand_offs.take_calls() + self._parking.take_calls()

    def _collect_chunks(self) -> tuple[list[scripts.Append], list[scripts.Relocation]]:
        appends: list[scripts.Append] = []
        relocations: list[scripts.Relocation] = []
        for task in [task for task in self._tasks.values() if task.unsent]:
            self._tasks.guard(task, partial(self._sender.collect, task, appends, relocations))
        return appends, relocations

    def _idle_reports(self) -> list[PendingCall]:
        """Return reports of tasks that run alone and wait for input, so that later deaths of the
        worker are not attributed to them.

        Tasks beside others need no report, since only a task that ran alone is given up after a
        death.
        """
        idle = [
            task
            for task in self._tasks.values()
            if task.alone and self._engine.due_in_s() == math.inf
        ]
        reports = [(task, task.take_idle_report()) for task in idle]
        return [
            (scripts.report_idle(task.request, task.stage, task.epoch, consumed), ignore_reply)
            for task, consumed in reports
            if consumed
        ]

    def _settle_appends(self, appends: list[scripts.Append], reply: Reply) -> None:
        for append, raw in zip(appends, cast("list[bytes]", reply), strict=True):
            answer, task, chunk = text(raw), self._tasks.get(append.chunk.request), append.chunk
            if task is None:
                continue
            if answer == "gap":
                self._tasks.fail(
                    task, ChunkOrderError(f"edge {chunk.edge}: chunk {chunk.index} left a gap")
                )
            elif answer in ("stale", "ended"):
                self._tasks.drop(task.request, keep_cached=True)
            elif append.finish:
                self._tasks.finish(task)


def is_urgent(calls: Sequence[PendingCall]) -> bool:
    return any(call.script in URGENT for call, _ in calls)
