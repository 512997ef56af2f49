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
    """A finished task was granted again, to recompute its tensors."""


H = Happened
_LIVE = (S.PENDING, S.GRANTED, S.RUNNING)
TABLE: dict[tuple[S, Happened], S] = {
    **{(state, H.GRANTED): S.GRANTED for state in (*_LIVE, S.LOST)},
    **{(state, H.CLAIMED): S.RUNNING for state in _LIVE},
    **{(state, H.FINISHED): S.FINISHED for state in (*_LIVE, S.FINISHED)},
    **{(state, H.FAILED): S.FAILED for state in (*_LIVE, S.FAILED)},
    **{(state, H.LOST): S.LOST for state in (*_LIVE, S.LOST)},
    (S.FINISHED, H.REMADE): S.GRANTED,
    # An event from before the task's end, replayed after a change of leader, changes nothing.
    **{
        (state, earlier): state
        for state in (S.FINISHED, S.FAILED)
        for earlier in (H.GRANTED, H.CLAIMED)
    },
    (S.LOST, H.CLAIMED): S.LOST,
}


def next_state(state: S, happened: Happened) -> S:
    """Return the state of a task in `state` after `happened`. Raises: TransitionError if the table
    has no such row.
    """
    try:
        return TABLE[state, happened]
    except KeyError as error:
        raise TransitionError(f"a {state} task cannot be {happened}") from error
