"""Whether a worker accepts tasks, by operators' orders (drain, resume, stop) and standby. Knows no
task.
"""

import logging
import math
import time

from fleet.core.ids import WorkerId
from fleet.telemetry.views import WorkerOrder

log = logging.getLogger(__name__)

LEAVE_S = 60.0
"""Time that a worker has to finish its tasks after an order to stop."""


class Availability:
    """Whether a worker accepts tasks. `draining`: True if it accepts no new task; `leaving`: True
    if it also exits once it is empty; `standing_by`: True while it waits to replace a lost worker.
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
        """Return the operator's order that the process's next incarnation must still follow; None
        if there is none.
        """
        if not self.draining:
            return None
        return "stop" if self.leaving else "drain"

    def may_leave(self, *, holds_anything: bool) -> bool:
        """Return True if a worker that was ordered to stop may exit: it is empty or out of time.
        Other workers continue its remaining tasks. `holds_anything`: True if it still has tasks or
        tensors that peers need.
        """
        return self.leaving and (not holds_anything or time.monotonic() > self._leave_by_s)
