"""Lifetime of a conversation's cached prefix: from the end of its last turn, or from the start of a
turn that was aborted.
"""

from types import SimpleNamespace
from typing import cast

from fleet.core.ids import Epoch, RequestId, StageName, WorkerId
from fleet.core.request import Sampling
from fleet.engine.base import EngineRequest
from fleet.worker.loop.cached_sessions import CachedSessions
from fleet.worker.task.task import Task

SESSION, KEEP_S = "talk", 60.0


class PrefixesOfOneSession:
    def __init__(self) -> None:
        self.sessions = {SESSION}

    def num_rows(self, session: str) -> int:
        return 9 if session in self.sessions else 0

    def drop(self, session: str | None = None) -> None:
        self.sessions -= {session}


class SteppedClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def new_sessions(clock: SteppedClock | None = None) -> CachedSessions:
    return CachedSessions(
        PrefixesOfOneSession(),
        WorkerId("w"),
        keep_s=KEEP_S,
        max_sessions=4,
        clock=clock or SteppedClock(),
    )


def sessions_after_one_turn() -> tuple[CachedSessions, SteppedClock]:
    clock = SteppedClock()
    sessions = new_sessions(clock)
    end_turn(sessions, "first", b"ok")
    return sessions, clock


def begin_turn(sessions: CachedSessions, request: str, session: str = SESSION) -> None:
    sessions.join(EngineRequest(request_id=RequestId(request), sampling=Sampling()), session)


def end_turn(sessions: CachedSessions, request: str, reply: bytes) -> None:
    """End a turn in the engine; `reply`: Redis's reply to the announcement of the cached prefix."""
    task = SimpleNamespace(
        spec=SimpleNamespace(session=SESSION),
        request=RequestId(request),
        stage=StageName("lm"),
        epoch=Epoch(1),
        cached_rows=0,
    )
    sessions.on_turn_ended(cast(Task, task))
    [(_, settle)] = sessions.take_calls()
    settle(reply)


def test_cached_session_expires_without_another_turn() -> None:
    sessions, clock = sessions_after_one_turn()
    clock.now_s = KEEP_S + 1
    sessions.expire()
    assert not sessions.has(SESSION)


def test_aborted_turns_keep_their_session_cached() -> None:
    sessions, clock = sessions_after_one_turn()
    for number in range(10):
        clock.now_s += KEEP_S * 0.9
        begin_turn(sessions, f"aborted {number}")
        sessions.expire()
        assert sessions.has(SESSION)
    clock.now_s += KEEP_S + 1
    sessions.expire()
    assert not sessions.has(SESSION)


def test_turn_of_another_session_does_not_keep_a_session_cached() -> None:
    sessions, clock = sessions_after_one_turn()
    clock.now_s = KEEP_S * 0.9
    begin_turn(sessions, "of another session", "other")
    assert not sessions.has("other")
    clock.now_s = KEEP_S + 1
    sessions.expire()
    assert not sessions.has(SESSION)


def test_first_turn_aborted_at_its_end_leaves_nothing_cached() -> None:
    """A first turn that is aborted at its end leaves nothing cached: its announcement is refused,
    so that no later turn would come to this worker for it.
    """
    sessions = new_sessions()
    end_turn(sessions, "first", b"ended")
    assert not sessions.has(SESSION)


def test_later_turn_aborted_at_its_end_leaves_the_earlier_prefix_cached() -> None:
    sessions, _ = sessions_after_one_turn()
    end_turn(sessions, "second", b"ended")
    assert sessions.has(SESSION)
    end_turn(sessions, "third", b"stale")
    assert not sessions.has(SESSION), "another worker owns the turn, and announces its own prefix"
