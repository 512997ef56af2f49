"""The task state machine as a table: (state, what happened) -> state. A missing row is an error."""

from enum import StrEnum

from fleet.conductor.state import TaskState as S
from fleet.core.errors import TransitionError


class Happened(StrEnum):
    GRANTED = "granted"
    CLAIMED = "claimed"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    REMADE = "remade"
    """Granted again after its end, to recompute its tensors."""


H = Happened
TABLE: dict[tuple[S, Happened], S] = {
    (S.PENDING, H.GRANTED): S.GRANTED,
    (S.GRANTED, H.GRANTED): S.GRANTED,
    (S.RUNNING, H.GRANTED): S.GRANTED,
    (S.LOST, H.GRANTED): S.GRANTED,
    (S.GRANTED, H.CLAIMED): S.RUNNING,
    (S.RUNNING, H.CLAIMED): S.RUNNING,
    (S.PENDING, H.CLAIMED): S.RUNNING,
    (S.PENDING, H.FINISHED): S.FINISHED,
    (S.GRANTED, H.FINISHED): S.FINISHED,
    (S.RUNNING, H.FINISHED): S.FINISHED,
    (S.FINISHED, H.FINISHED): S.FINISHED,
    (S.PENDING, H.FAILED): S.FAILED,
    (S.GRANTED, H.FAILED): S.FAILED,
    (S.RUNNING, H.FAILED): S.FAILED,
    (S.FAILED, H.FAILED): S.FAILED,
    (S.PENDING, H.LOST): S.LOST,
    (S.GRANTED, H.LOST): S.LOST,
    (S.RUNNING, H.LOST): S.LOST,
    (S.LOST, H.LOST): S.LOST,
    (S.FINISHED, H.REMADE): S.GRANTED,
    # An event from before the task's end, replayed after a change of leader, changes nothing.
    (S.FINISHED, H.GRANTED): S.FINISHED,
    (S.FINISHED, H.CLAIMED): S.FINISHED,
    (S.FAILED, H.GRANTED): S.FAILED,
    (S.FAILED, H.CLAIMED): S.FAILED,
    (S.LOST, H.CLAIMED): S.LOST,
}


def next_state(state: S, happened: Happened) -> S:
    """Return the state that follows. Raises: TransitionError if the table has no row."""
    try:
        return TABLE[state, happened]
    except KeyError as error:
        raise TransitionError(f"a {state} task cannot be {happened}") from error
