"""State tables of the voice code are complete, have no dead ends, and raise an error for missing
rows.
"""

from collections.abc import Mapping
from typing import TypeVar

import pytest

from fleet.core.errors import TransitionError
from web.realtime.states import (
    RESPONSE_TABLE,
    SESSION_TABLE,
    TURN_TABLE,
    ResponseActivity,
    ResponseInput,
    ResponseState,
    SessionState,
    TurnInput,
    TurnState,
    UserActivity,
    next_state,
)

S = TypeVar("S")
H = TypeVar("H")


def reachable(table: Mapping[tuple[S, H], S], start: S) -> set[S]:
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        new = {after for (before, _), after in table.items() if before == state} - found
        found |= new
        frontier += new
    return found


def test_every_turn_state_is_reachable_and_returns_to_idle() -> None:
    assert reachable(TURN_TABLE, TurnState.IDLE) == set(TurnState)
    assert all(TurnState.IDLE in reachable(TURN_TABLE, state) for state in TurnState)


def test_every_response_state_is_reachable_and_detached_is_final() -> None:
    assert reachable(RESPONSE_TABLE, ResponseState.WAITING) == set(ResponseState)
    assert reachable(RESPONSE_TABLE, ResponseState.DETACHED) == {ResponseState.DETACHED}


def test_ended_response_never_streams_again() -> None:
    assert reachable(RESPONSE_TABLE, ResponseState.ENDED) == {
        ResponseState.ENDED,
        ResponseState.RESENDING,
        ResponseState.DETACHED,
    }


def test_session_table_has_a_row_for_every_activity_and_every_state() -> None:
    assert set(SESSION_TABLE) == {
        (user, response) for user in UserActivity for response in ResponseActivity
    }
    assert set(SESSION_TABLE.values()) == set(SessionState)


def test_missing_row_is_an_error() -> None:
    with pytest.raises(TransitionError, match="idle cannot become paused"):
        next_state(TURN_TABLE, TurnState.IDLE, TurnInput.PAUSED)
    with pytest.raises(TransitionError, match="ended cannot become output_sent"):
        next_state(RESPONSE_TABLE, ResponseState.ENDED, ResponseInput.OUTPUT_SENT)
