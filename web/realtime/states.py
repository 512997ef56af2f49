"""States of a voice session as transition tables: the user's turn, the response, and the session's
state, which follows from both.

A transition that no table contains is an error. Knows no audio, no event of the protocol and no
time.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from fleet.core.errors import TransitionError


class TurnState(StrEnum):
    IDLE = "idle"
    SPEAKING = "speaking"
    PAUSED = "paused"
    """The user has been silent for long enough that the turn may be over; a speculative response
    may have been started.
    """


class TurnInput(StrEnum):
    STARTED = "started"
    PAUSED = "paused"
    RESUMED = "resumed"
    STOPPED = "stopped"
    """The turn detector ended the turn."""
    COMMITTED = "committed"
    """The client ended the turn."""
    DISCARDED = "discarded"
    """The turn's audio was discarded: the client cleared it, or its audio format is refused."""


class ResponseState(StrEnum):
    WAITING = "waiting"
    """The response has begun, and no output has been sent."""
    STREAMING = "streaming"
    ENDED = "ended"
    """`response.done` has been sent, which contains the outcome."""
    RESENDING = "resending"
    """The response has ended, and its audio is being sent again to a client that reconnected."""
    DETACHED = "detached"
    """This gateway sends nothing more of the response: another gateway does, or the session is
    over.
    """


class ResponseInput(StrEnum):
    OUTPUT_SENT = "output_sent"
    ENDED = "ended"
    RESEND = "resend"
    RESENT = "resent"
    """All audio was sent again, or sending it again was stopped."""
    DETACHED = "detached"


class UserActivity(StrEnum):
    SILENT = "silent"
    SPEAKING = "speaking"
    INTERRUPTING = "interrupting"
    """The user is speaking, and a response was cancelled because of it."""


class ResponseActivity(StrEnum):
    NONE = "none"
    WAITING = "waiting"
    AUDIBLE = "audible"


class SessionState(StrEnum):
    """State of a voice session, as clients and the console see it."""

    LISTENING = "listening"
    HEARING = "hearing"
    THINKING = "thinking"
    SPEAKING = "speaking"
    INTERRUPTED = "interrupted"


_T, _TI, _R, _RI = TurnState, TurnInput, ResponseState, ResponseInput
TURN_TABLE: dict[tuple[TurnState, TurnInput], TurnState] = {
    (_T.IDLE, _TI.STARTED): _T.SPEAKING,
    (_T.SPEAKING, _TI.PAUSED): _T.PAUSED,
    (_T.PAUSED, _TI.RESUMED): _T.SPEAKING,
    (_T.SPEAKING, _TI.STOPPED): _T.IDLE,
    (_T.PAUSED, _TI.STOPPED): _T.IDLE,
    # Without a detector, turns begin and end with the client's commit.
    **{(state, ended): _T.IDLE for state in _T for ended in (_TI.COMMITTED, _TI.DISCARDED)},
}
RESPONSE_TABLE: dict[tuple[ResponseState, ResponseInput], ResponseState] = {
    (_R.WAITING, _RI.OUTPUT_SENT): _R.STREAMING,
    (_R.WAITING, _RI.ENDED): _R.ENDED,
    (_R.STREAMING, _RI.ENDED): _R.ENDED,
    (_R.ENDED, _RI.RESEND): _R.RESENDING,
    (_R.RESENDING, _RI.RESEND): _R.RESENDING,
    (_R.RESENDING, _RI.RESENT): _R.ENDED,
    **{(state, _RI.DETACHED): _R.DETACHED for state in _R},
    # A client that is being disconnected may still cancel its response, which another gateway sends
    # by then.
    (_R.DETACHED, _RI.ENDED): _R.DETACHED,
}
SESSION_TABLE: dict[tuple[UserActivity, ResponseActivity], SessionState] = {
    (UserActivity.SILENT, ResponseActivity.NONE): SessionState.LISTENING,
    (UserActivity.SILENT, ResponseActivity.WAITING): SessionState.THINKING,
    (UserActivity.SILENT, ResponseActivity.AUDIBLE): SessionState.SPEAKING,
    **{(UserActivity.SPEAKING, response): SessionState.HEARING for response in ResponseActivity},
    **{
        (UserActivity.INTERRUPTING, response): SessionState.INTERRUPTED
        for response in ResponseActivity
    },
}


StateT = TypeVar("StateT")
InputT = TypeVar("InputT")


def next_state(
    table: Mapping[tuple[StateT, InputT], StateT], state: StateT, happened: InputT
) -> StateT:
    """Return the state after the input `happened`. Raises: TransitionError if the table has no such
    transition.
    """
    try:
        return table[state, happened]
    except KeyError as error:
        raise TransitionError(f"{type(state).__name__} {state} cannot become {happened}") from error
