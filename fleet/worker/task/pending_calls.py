"""Redis scripts to run with the next round trip, each with a function that handles its reply. Knows
no order of calls.
"""

from collections.abc import Callable

from redis.exceptions import ResponseError

from fleet.control import scripts
from fleet.control.connect import Reply
from fleet.core.ids import WorkerId
from fleet.telemetry.counts import BATCHED, RECEIVED
from fleet.worker.task.task import Task

PendingCall = tuple[scripts.Call, Callable[[Reply], None]]
"""A script call, and the function that handles its reply."""


def ignore_reply(_reply: Reply) -> None:
    """Ignore the reply of a write whose refusal means only that another worker owns the task now; a
    notice reports the end of the task here.
    """


def is_unwritten(reply: Reply) -> bool:
    """Return True if a call changed nothing and is to be sent again: Redis refused it, or refused
    an earlier call that it depends on.
    """
    return isinstance(reply, ResponseError) or reply == [b"behind"]


def statistics_calls(task: Task, worker: WorkerId) -> list[PendingCall]:
    """Return the calls that write statistics of a task: how its inputs arrived, and the batches in
    which it was computed. Run them while this worker still has the right to write for the task.
    """
    lines = {RECEIVED: task.receipts.line(worker), BATCHED: task.batches.line(worker)}
    return [
        (
            scripts.set_task_metadata(
                task.request, task.stage, task.epoch, f"{name}:{task.epoch}", line
            ),
            ignore_reply,
        )
        for name, line in lines.items()
        if line
    ]
