"""The state machines of a request and of its tasks, as the Lua scripts enforce them: the scripts
get these tables as Lua tables (`fleet.control.lua_source`), and change a state by `move` and
`set_state` in `lua/common` only. A move without a row is an error.

A task is the work of one stage on one request; the client's reading of the answer is a task too.
Knows no Redis.
"""

from collections.abc import Mapping
from enum import StrEnum


class TaskState(StrEnum):
    """State of a task, field `state` of its hash. NEW: the hash does not exist yet.

    Only a RUNNING task has an owner. A GRANTED task waits for a worker of its role. A PARKED task
    waits for credit from its consumers, or for input from another parked task. Only the client's
    task stays LOST, until a gateway attaches: the script that loses any other task grants it again.
    """

    NEW = ""
    GRANTED = "granted"
    RUNNING = "running"
    PARKED = "parked"
    LOST = "lost"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class Happened(StrEnum):
    """Event in the life of a task.

    ATTACHED: a gateway reads the answer; only the client's task has this event. CLOSED: the request
    of the task has ended. A FINISHED task can be GRANTED again, to recompute tensors that were lost
    with their worker, and so can a GRANTED task whose grant is overdue.
    """

    GRANTED = "granted"
    CLAIMED = "claimed"
    HANDED_OFF = "handed_off"
    PARKED = "parked"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    ATTACHED = "attached"
    CLOSED = "closed"


class RequestState(StrEnum):
    """State of a request, field `state` of its hash. NEW: the hash does not exist yet."""

    NEW = ""
    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


_S, _R = TaskState, RequestState

TASK_MOVES: Mapping[Happened, Mapping[TaskState, TaskState]] = {
    Happened.GRANTED: dict.fromkeys(
        (_S.NEW, _S.LOST, _S.PARKED, _S.GRANTED, _S.FINISHED), _S.GRANTED
    ),
    Happened.CLAIMED: {_S.GRANTED: _S.RUNNING},
    Happened.HANDED_OFF: {_S.RUNNING: _S.GRANTED},
    Happened.PARKED: {_S.RUNNING: _S.PARKED},
    # The last chunk may be appended, or the delivery acknowledged, once more.
    Happened.FINISHED: dict.fromkeys((_S.RUNNING, _S.FINISHED), _S.FINISHED),
    Happened.FAILED: {_S.RUNNING: _S.FAILED},
    Happened.LOST: dict.fromkeys((_S.GRANTED, _S.RUNNING), _S.LOST),
    Happened.ATTACHED: dict.fromkeys((_S.NEW, _S.LOST, _S.RUNNING, _S.FINISHED), _S.RUNNING),
    Happened.CLOSED: {
        **dict.fromkeys((_S.NEW, _S.GRANTED, _S.RUNNING, _S.PARKED, _S.LOST), _S.ABORTED),
        **{ended: ended for ended in (_S.FINISHED, _S.FAILED, _S.ABORTED)},
    },
}
"""New state of a task, by event and former state. A pair that is missing is an error."""

_ENDS = (_R.FINISHED, _R.FAILED, _R.ABORTED)
REQUEST_MOVES: Mapping[RequestState, Mapping[RequestState, RequestState]] = {
    _R.NEW: {_R.SUBMITTED: _R.SUBMITTED},
    _R.SUBMITTED: {state: state for state in (_R.RUNNING, *_ENDS)},
    _R.RUNNING: {state: state for state in _ENDS},
    **{end: dict[RequestState, RequestState]() for end in _ENDS},
}
"""Permitted new states of a request, by former state; each new state is mapped to itself."""
