"""Conversations that this worker's engine caches for their next turns: how long, how many, and
their announcement in Redis.

Knows no engine memory: the engine owns the cached keys and values and frees them whenever a request
needs the memory.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.core.ids import StageName, WorkerId
from fleet.engine.base import EngineRequest
from fleet.engine.capabilities import CachedPrefixes
from fleet.worker.task.pending_calls import PendingCall
from fleet.worker.task.task import Task


class CachedSessions:
    """Conversations cached in this worker: each is kept for `keep_s` after its last turn, and at
    most `max_sessions` are kept, the latest ones.

    If `keep_s` or `max_sessions` is 0, nothing is cached.
    """

    def __init__(
        self,
        prefixes: CachedPrefixes | None,
        worker: WorkerId,
        *,
        keep_s: float,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefixes = prefixes
        self._worker = worker
        self._clock = clock
        self._keep_s, self._max_sessions = keep_s, max_sessions
        self._until: dict[str, float] = {}
        self._calls: list[PendingCall] = []

    def join(self, request: EngineRequest, session: str) -> EngineRequest:
        """Return the request with its session's name set, so that the engine reuses and caches the
        conversation; unchanged if this worker caches nothing. The session's time to live starts
        again, even if this turn is aborted later.
        """
        if session in self._until:
            self._until[session] = self._clock() + self._keep_s
        return dataclasses.replace(request, session=session) if self.is_on else request

    @property
    def is_on(self) -> bool:
        """True if this worker caches conversations."""
        return self._max_sessions > 0 and self._keep_s > 0

    def _num_rows(self, session: str) -> int:
        return self._prefixes.num_rows(session) if self._prefixes is not None else 0

    def has(self, session: str) -> bool:
        """Return True if an earlier turn of the session is cached here and has not expired. An
        aborted turn leaves the cache of earlier turns as it was.
        """
        return session in self._until

    def on_turn_ended(self, task: Task) -> None:
        """Queue the announcement in Redis of what the engine cached for a task that ended normally.
        Redis must run the queued call (`take_calls`) while this worker still owns the task.
        """
        session = task.spec.session
        if not session or not self.is_on:
            return
        num_rows = self._num_rows(session)
        call = scripts.cache_prefix(
            task.request,
            task.stage,
            task.epoch,
            self._worker,
            session,
            num_rows=num_rows,
            reused=task.cached_rows,
            keep_s=self._keep_s,
        )
        self._calls.append((call, partial(self._settle, session, was_announced=self.has(session))))
        self._until.pop(session, None)
        if num_rows:
            self._until[session] = self._clock() + self._keep_s
        self._drop_oldest()

    def adopt(self, stage: StageName, session: str) -> None:
        """Queue the announcement in Redis of a saved session that was loaded into the engine's
        cache.
        """
        call = scripts.adopt_prefix(self._worker, stage, session, keep_s=self._keep_s)
        self._calls.append((call, partial(self._settle, session, was_announced=False)))
        self._until.pop(session, None)
        self._until[session] = self._clock() + self._keep_s
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        cached = [session for session in self._until if self._num_rows(session)]
        for session in cached[: max(0, len(cached) - self._max_sessions)]:
            self._drop(session)

    def _settle(self, session: str, reply: Reply, *, was_announced: bool) -> None:
        """Drop a cached session if Redis refused its announcement: no turn would be sent here for
        it.

        `was_announced`: True if an earlier turn announced the session. If this turn was aborted at
        the same moment, the cache of that earlier turn stays.
        """
        answer = text(reply)
        if answer != "ok" and not (was_announced and answer == "ended"):
            self._drop(session)

    def take_calls(self) -> list[PendingCall]:
        calls, self._calls = self._calls, []
        return calls

    def expire(self) -> None:
        now = self._clock()
        for session in [session for session, until in self._until.items() if until < now]:
            self._drop(session)

    def _drop(self, session: str) -> None:
        self._until.pop(session, None)
        if self._prefixes is not None:
            self._prefixes.drop(session)
