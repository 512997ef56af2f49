"""Scripts to run with the next round trip, each with the handler of its reply. Knows no order of
calls.
"""

from collections.abc import Callable

from redis.exceptions import ResponseError

from fleet.control import scripts
from fleet.control.connect import Reply
from fleet.core.ids import WorkerId
from fleet.telemetry.counts import RECEIVED
from fleet.worker.task.task import Task

PendingCall = tuple[scripts.Call, Callable[[Reply], None]]
"""A script, and what to do with its reply."""


def ignore_reply(_reply: Reply) -> None:
    """For writes whose refusal means only that another owner has the right now; the end of the task
    arrives as a notice.
    """


def is_unwritten(reply: Reply) -> bool:
    """Return True if the call changed nothing and is to be sent again: Redis refused it, or an
    earlier one that it follows.
    """
    return isinstance(reply, ResponseError) or reply == [b"behind"]


def receipt_calls(task: Task, worker: WorkerId) -> list[PendingCall]:
    """Write how a task's inputs arrived, while this worker still has the right to write for the
    task.
    """
    line = task.receipts.line(worker)
    if not line:
        return []
    return [
        (
            scripts.set_task_metadata(
                task.request, task.stage, task.epoch, f"{RECEIVED}:{task.epoch}", line
            ),
            ignore_reply,
        )
    ]
