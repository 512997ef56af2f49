"""How long a worker keeps what a turn left: from the end of the last turn, or the beginning of one that was cut short."""

from types import SimpleNamespace
from typing import cast

from fleet.core.ids import Epoch, RequestId, StageName, WorkerId
from fleet.core.request import Sampling
from fleet.engine.base import Engine, EngineRequest
from fleet.worker.cached_sessions import CachedSessions
from fleet.worker.task import Task

TALK, KEEP_S = "talk", 60.0


class EngineWithCachedRows:
    """An engine that keeps what it is not told to forget."""

    def __init__(self) -> None:
        self.sessions = {TALK}

    def num_cached_rows(self, session: str) -> int:
        return 9 if session in self.sessions else 0

    def drop_cached(self, session: str) -> None:
        self.sessions.discard(session)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_turn(name: str) -> EngineRequest:
    return EngineRequest(request_id=RequestId(name), sampling=Sampling())


def after_one_turn() -> tuple[CachedSessions, Clock]:
    clock = Clock()
    sessions = CachedSessions(cast(Engine, EngineWithCachedRows()), WorkerId("w"), keep_s=KEEP_S, most=4, clock=clock)
    told(sessions, "first", b"ok")
    return sessions, clock


def told(sessions: CachedSessions, request: str, reply: bytes) -> None:
    """A turn comes to its end in the engine; Redis answers what is told of it."""
    task = SimpleNamespace(
        spec=SimpleNamespace(session=TALK), request=RequestId(request), stage=StageName("lm"), epoch=Epoch(1), cached_rows=0
    )
    sessions.ended(cast(Task, task))
    [(_, settle)] = sessions.posts()
    settle(reply)


def test_without_a_turn_it_is_given_up_in_time() -> None:
    sessions, clock = after_one_turn()
    clock.now_s = KEEP_S + 1
    sessions.expire()
    assert not sessions.keeps(TALK)


def test_turns_that_are_all_cut_short_keep_it_alive() -> None:
    """A user who interrupts every answer for minutes still talks."""
    sessions, clock = after_one_turn()
    for number in range(10):
        clock.now_s += KEEP_S * 0.9
        sessions.joined(a_turn(f"cut {number}"), TALK)
        sessions.expire()
        assert sessions.keeps(TALK)
    clock.now_s += KEEP_S + 1
    sessions.expire()
    assert not sessions.keeps(TALK)


def test_a_turn_of_another_conversation_changes_nothing() -> None:
    sessions, clock = after_one_turn()
    clock.now_s = KEEP_S * 0.9
    sessions.joined(a_turn("of another"), "other")
    assert not sessions.keeps("other")
    clock.now_s = KEEP_S + 1
    sessions.expire()
    assert not sessions.keeps(TALK)


def test_a_first_turn_that_was_aborted_as_it_ended_leaves_nothing() -> None:
    """Its request is no longer live when the worker tells of what it keeps, so nobody will ever ask for it."""
    sessions = CachedSessions(cast(Engine, EngineWithCachedRows()), WorkerId("w"), keep_s=KEEP_S, most=4)
    told(sessions, "first", b"ended")
    assert not sessions.keeps(TALK)


def test_a_turn_that_was_aborted_as_it_ended_gives_back_what_it_began_with() -> None:
    """An earlier turn said where it is: the next one is put here."""
    sessions, _ = after_one_turn()
    told(sessions, "second", b"ended")
    assert sessions.keeps(TALK)
    told(sessions, "third", b"stale")
    assert not sessions.keeps(TALK), "another worker has the turn, and says so itself"
