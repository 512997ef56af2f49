"""A worker's readiness to accept tasks: an operator's orders (drain, resume, stop) and standby.
Knows no task.
"""

import logging
import math
import time

from fleet.core.ids import WorkerId
from fleet.telemetry.views import WorkerOrder

log = logging.getLogger(__name__)

LEAVE_S = 60.0
"""Time in which a worker that was ordered to stop may finish its tasks."""


class Availability:
    """`draining`: accepts no new task. `leaving`: also exits once it is empty. `standing_by`:
    replaces a worker that is lost.
    """

    def __init__(self, *, standing_by: bool = False) -> None:
        self.draining = self.leaving = False
        self.standing_by = standing_by
        self._leave_by_s = math.inf

    @property
    def accepts_tasks(self) -> bool:
        return not (self.draining or self.standing_by)

    def apply_order(self, order: WorkerOrder) -> None:
        if order == "dump":
            return  # answered by the lease thread, since this thread may be the one that hangs
        self.draining = order != "resume"
        self.standing_by = False
        if order == "stop":
            self.leaving = True
            self._leave_by_s = time.monotonic() + LEAVE_S

    def promote(self, worker: WorkerId) -> None:
        log.info("worker %s ends its standby and accepts tasks", worker)
        self.standing_by = False

    def order_in_force(self) -> WorkerOrder | None:
        """Return the order that the process's next incarnation must still follow."""
        if not self.draining:
            return None
        return "stop" if self.leaving else "drain"

    def may_leave(self, *, holds_anything: bool) -> bool:
        """Return True once a stopped worker is empty or out of time; other workers continue what is
        left.
        """
        return self.leaving and (not holds_anything or time.monotonic() > self._leave_by_s)
