"""Tasks that wait for a slow reader give up their slots: their logs are their state, and credit
grants them again.
"""

import math
import time
from functools import partial
from typing import cast

from fleet.control import scripts
from fleet.control.connect import Reply, text, texts
from fleet.core.ids import RequestId
from fleet.engine.base import Engine
from fleet.worker.context import WorkerContext
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.task.pending_calls import PendingCall
from fleet.worker.task.task import Task, TaskPhase

Progress = tuple[int, ...]


class Parking:
    """Parks tasks that have been without credit for `lease.park_after_s`, and tasks that have
    waited as long for input from a parked task. An answer with a slow reader then holds no slot of
    any stage.
    """

    def __init__(self, context: WorkerContext, parts: WorkerParts) -> None:
        self._after_s = context.config.lease.park_after_s
        self._engine: Engine = context.engine
        self._tasks = parts.tasks
        self._since: dict[RequestId, tuple[Progress, float]] = {}
        """For each waiting task, its progress, and since when it has made none."""
        self._next_s = -math.inf

    def take_calls(self) -> list[PendingCall]:
        """Return the calls that park the tasks that have waited for long enough."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + self._after_s / 4
        waiting = [task for task in self._tasks.values() if self._waits(task)]
        self._since = {task.request: self._waiting_since(task, now_s) for task in waiting}
        due = [task for task in waiting if now_s - self._since[task.request][1] >= self._after_s]
        return [self._call(task) for task in due]

    def _waits(self, task: Task) -> bool:
        if task.phase is TaskPhase.OUT_OF_CREDIT:
            return True
        return task.is_starved(self._engine.num_unread(task.request))

    def _waiting_since(self, task: Task, now_s: float) -> tuple[Progress, float]:
        progress = task.progress()
        known = self._since.get(task.request)
        return known if known is not None and known[0] == progress else (progress, now_s)

    def _call(self, task: Task) -> PendingCall:
        waits = task.credit_waits()
        if waits:
            call = scripts.park(task.request, task.stage, task.epoch, waits)
            return call, partial(self._settle, task, waits)
        inputs = [
            (name, task.producers[name], edge.consumed) for name, edge in task.inbound.items()
        ]
        call = scripts.park_starved(task.request, task.stage, task.epoch, inputs)
        return call, partial(self._settle_starved, task)

    def _settle(self, task: Task, waits: list[scripts.CreditWait], reply: Reply) -> None:
        answer, *consumed = texts(cast("list[bytes]", reply))
        self._end(task, answer)
        if answer == "credit":  # its notice was lost, or is on the way
            for wait, num_chunks in zip(waits, consumed, strict=True):
                task.add_credit(wait.edge, int(num_chunks))

    def _settle_starved(self, task: Task, reply: Reply) -> None:
        self._end(task, text(reply))

    def _end(self, task: Task, answer: str) -> None:
        """Act on `answer`, the reply to a park call: end the task here if it is parked or no longer
        this worker's; otherwise measure its waiting time from the beginning again.
        """
        self._since.pop(task.request, None)
        if self._tasks.get(task.request) is not task:
            return
        if answer == "parked":
            self._tasks.restart_elsewhere(task)
        elif answer in ("stale", "ended"):
            self._tasks.drop(task.request, keep_cached=True)
