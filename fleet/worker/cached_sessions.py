"""What this worker keeps for the next turns of conversations: for how long, of how many, and telling the fleet. Knows no engine's
memory: what is kept is the engine's, which gives it up whenever a request needs the room.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.core.ids import WorkerId
from fleet.engine.base import Engine, EngineRequest
from fleet.worker.hand_off_coordinator import PendingCall
from fleet.worker.task import Task


class CachedSessions:
    """For one worker. A session's prefix is kept for `keep_s` after the turn that left it; at most `most` are, the last ones.

    Where either is 0, nothing is kept.
    """

    def __init__(
        self, engine: Engine, worker: WorkerId, *, keep_s: float, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._worker, self._clock = engine, worker, clock
        self._keep_s, self._most = keep_s, most
        self._until: dict[str, float] = {}
        self._posts: list[PendingCall] = []

    def joined(self, request: EngineRequest, session: str) -> EngineRequest:
        """The request as one of its session, whose time begins anew: it talks, even if this turn is cut short."""
        if session in self._until:
            self._until[session] = self._clock() + self._keep_s
        return dataclasses.replace(request, session=session) if self._most and self._keep_s else request

    def keeps(self, session: str) -> bool:
        """Whether an earlier turn left something here, for a time that is not over: an aborted turn gives it back."""
        return session in self._until

    def ended(self, task: Task) -> None:
        """The engine has done with the task, normally. Its owner says so while it still has the right to."""
        session = task.spec.session
        if not session or not self._most or not self._keep_s:
            return
        kept = self._engine.num_cached_rows(session)
        call = scripts.cache_prefix(
            task.request, task.stage, task.epoch, self._worker, session, kept=kept, spared=task.cached_rows, keep_s=self._keep_s
        )
        self._posts.append((call, partial(self._settle, session, again=self.keeps(session))))
        self._until.pop(session, None)
        if kept:
            self._until[session] = self._clock() + self._keep_s
        self._bound()

    def _bound(self) -> None:
        there = [session for session in self._until if self._engine.num_cached_rows(session)]
        for session in there[: max(0, len(there) - self._most)]:
            self._give_up(session)

    def _settle(self, session: str, reply: Reply, *, again: bool) -> None:
        """Nobody would come for what is not known to be here; `again`: an earlier turn said that it is, so that one which was
        aborted before it could say so gives back what it began with, like any that is cut short.
        """
        answer = text(reply)
        if answer != "ok" and not (again and answer == "ended"):
            self._give_up(session)

    def posts(self) -> list[PendingCall]:
        posts, self._posts = self._posts, []
        return posts

    def expire(self) -> None:
        now = self._clock()
        for session in [session for session, until in self._until.items() if until < now]:
            self._give_up(session)

    def _give_up(self, session: str) -> None:
        self._until.pop(session, None)
        self._engine.drop_cached(session)
