"""The kept answers, sessions and incidents, as the gateway reads and writes them: off the event
loop, and never a reason to fail a request. Knows no route.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from fleet.config import FleetConfig
from fleet.core.clock import now_us
from fleet.core.ids import RequestId
from fleet.history.file import HistoryFile
from fleet.history.incidents import KeptIncident, KeptIncidentStore
from fleet.history.sessions import KeptSession, KeptSessionFilter, KeptSessionStore
from fleet.history.store import HistoryStore, KeptAnswer

log = logging.getLogger("fleet.web")

MIB = 1 << 20
P = ParamSpec("P")
T = TypeVar("T")


class AnswerHistory:
    """Kept answers, sessions and incidents of this host. An error of the file is logged, and the
    method then returns what it returns for an empty file: None, False or an empty list. Disabled by
    `history.max_mib: 0`.
    """

    def __init__(self, config: FleetConfig) -> None:
        settings = config.history
        self.folder = config.history_dir
        self.keeps_sound = settings.sound
        self.is_enabled = settings.max_mib > 0
        file = HistoryFile(self.folder, settings.max_mib * MIB, settings.days)
        self._store, self._sessions = HistoryStore(file), KeptSessionStore(file)
        self._incidents = KeptIncidentStore(file)

    async def keep(self, answer: KeptAnswer) -> None:
        await self._call(None, self._store.keep, answer)

    async def read(self, request: RequestId) -> KeptAnswer | None:
        """Return a request's kept answer with its record and sound; None if none is kept."""
        return await self._call(None, self._store.read, request)

    async def has_sound(self, request: RequestId) -> bool:
        """Return True if the sound of an answer is kept."""
        return await self._call(False, self._store.has_sound, request)

    async def newest(
        self, limit: int, *, before_us: int = 0, why: str = ""
    ) -> Sequence[KeptAnswer]:
        """Return kept answers as `HistoryStore.newest` does."""
        return await self._call([], self._store.newest, limit, before_us=before_us, why=why)

    async def counts(self) -> Mapping[str, int]:
        """Return the number of kept answers by reason, as `HistoryStore.counts` does."""
        return await self._call({}, self._store.counts)

    async def pin(self, request: RequestId, *, pinned: bool) -> bool:
        """Set whether a kept answer outlasts `history.days`: True protects the answer from removal
        by age, False ends this protection. Return False if the answer is not kept.
        """
        return await self._call(False, self._store.pin, request, pinned=pinned)

    async def keep_incident(self, incident: KeptIncident) -> bool:
        """Write an incident to the file; return False if the incident could not be written."""
        return await self._call(False, self._keep_incident, incident)

    def _keep_incident(self, incident: KeptIncident) -> bool:
        self._incidents.keep(incident, now_us())
        return True

    async def incident(self, incident: str) -> KeptIncident | None:
        """Return the kept incident with this id, including its record; None if it is not kept."""
        return await self._call(None, self._incidents.read, incident)

    async def incidents(self, limit: int, *, before_us: int = 0) -> Sequence[KeptIncident]:
        """Return kept incidents as `KeptIncidentStore.newest` does."""
        return await self._call([], self._incidents.newest, limit, before_us=before_us)

    async def keep_session(self, kept: KeptSession) -> None:
        await self._call(None, self._sessions.keep, kept)

    async def session(self, session: str) -> KeptSession | None:
        """Return a kept session as `KeptSessionStore.read` does."""
        return await self._call(None, self._sessions.read, session)

    async def sessions(
        self, limit: int, wanted: KeptSessionFilter, *, before_us: int = 0
    ) -> Sequence[KeptSession]:
        """Return kept sessions as `KeptSessionStore.newest` does."""
        return await self._call([], self._sessions.newest, limit, wanted, before_us=before_us)

    async def _call(
        self, otherwise: T, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if not self.is_enabled:
            return otherwise
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except (OSError, sqlite3.Error) as error:
            log.warning("the kept answers in %s cannot be used: %s", self.folder, error)
            return otherwise
