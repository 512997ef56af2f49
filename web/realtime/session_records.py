"""Records of voice sessions in Redis: which gateway holds a session, and until when. Knows no
session object and no socket.

A record that is written while its client leaves is undone, so that no session remains without one.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from fleet.config.schema import LeaseConfig
from fleet.control.client import HeldVoice, Saved
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, NotFound, SecretInUse, quoted
from web.gateway.gateway import Gateway
from web.http.errors import SessionEndedByOperator
from web.realtime.clock import Clock
from web.realtime.session_views import shown_id
from web.realtime.snapshot import STATE

log = logging.getLogger("fleet.web")

RENEW_S = 2.0
"""Interval in which a session that does not change is written, so that it does not expire."""
SPARE_S = 10.0
"""Time that a session outlives its client's absence in Redis, so that the gateway is the one to end
it.
"""
FIRST_S = 10.0
"""Lifetime in Redis of a session that was never written: after it, a client that left before the
first write does not count any more.
"""
ABSENCE_POLL_S, ABSENCE_SPARE_S = 0.1, 0.5
ENDED = "an operator ended the session"


def absence_tries(lease: LeaseConfig) -> int:
    """Number of tries for a secret in use, `ABSENCE_POLL_S` apart: a gateway that died is fenced
    before.

    A page that is reloaded may also connect before the loss of its former connection is noticed.
    """
    return 1 + math.ceil((lease.worker_ttl_s + ABSENCE_SPARE_S) / ABSENCE_POLL_S)


Undo = Callable[[int], Coroutine[None, None, None]]
"""Callback with the epoch of a session whose client left while it was being held."""


class SessionRecords:
    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._voice = gateway.client.voice
        self._clock = clock
        self._ttl_s = gateway.config.voice.reconnect_timeout_s + SPARE_S
        self._retrying: set[str] = set()
        """Client secrets at their session limit, each with a client waiting for the old connection
        to time out.
        """
        self._ending: set[asyncio.Task[None]] = set()

    async def create(self, session_id: str, owner: str) -> HeldVoice:
        """Create the record of a session. Raises: SecretInUse, RedisUnreachable."""
        tries_left = absence_tries(self._gateway.config.lease)
        while True:
            try:
                held = await self._hold(session_id, FIRST_S, owner, new=True)
                assert held is not None, "two sessions of one name"
                return held
            except SecretInUse:
                tries_left -= 1
                if owner in self._retrying or tries_left <= 0:
                    raise
            self._retrying.add(owner)
            try:
                await self._clock.sleep(ABSENCE_POLL_S)
            finally:
                self._retrying.discard(owner)

    async def hold_again(self, session_id: str, owner: str) -> HeldVoice | None:
        """Restart the duration of a session after its time in the queue; None if its record is
        lost. Raises: RedisUnreachable.
        """
        return await self._hold(session_id, self._ttl_s, owner)

    async def take_over(self, session_id: str, owner: str) -> HeldVoice:
        """Become the holder of another gateway's session. If the caller is cancelled meanwhile, the
        client may still reconnect, or open another session.

        Raises: NotFound, also for a session of another owner; SessionEndedByOperator,
        RedisUnreachable.
        """

        async def mark_away(epoch: int) -> None:
            away = {"away_us": str(now_us()).encode()}
            await self.save(session_id, epoch, owner, away)

        held = await self._hold(session_id, self._ttl_s, owner, undo=mark_away)
        if held is None and await self.was_ended(session_id, owner):
            raise SessionEndedByOperator(ENDED, param="session")
        if held is not None and STATE not in held.fields:
            # Its gateway died before it wrote anything of it.
            await self._delete(session_id, held.epoch)
            held = None
        if held is None:
            raise NotFound(
                f"session: no session {quoted(session_id)}; it never existed, or is over. Begin "
                "another",
                param="session",
            )
        return held

    async def _hold(
        self,
        session_id: str,
        ttl_s: float,
        owner: str,
        *,
        undo: Undo | None = None,
        new: bool = False,
    ) -> HeldVoice | None:
        """Become the holder of a session. If the caller is cancelled meanwhile, call `undo`, or
        delete the record.

        Raises: SecretInUse, RedisUnreachable.
        """
        holding = asyncio.ensure_future(self._voice.hold(session_id, ttl_s, owner, new=new))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            self._spawn(self._undo(session_id, holding, undo))
            raise

    async def _undo(
        self, session_id: str, holding: asyncio.Future[HeldVoice | None], undo: Undo | None
    ) -> None:
        with contextlib.suppress(FleetError):
            held = await holding
            if held is not None:
                await (undo(held.epoch) if undo else self._delete(session_id, held.epoch))

    @asynccontextmanager
    async def renewing(self, session_id: str, epoch: int, owner: str) -> AsyncIterator[None]:
        """Renew the record of a queued client, which counts among the sessions of its secret."""
        task = asyncio.create_task(self._renew(session_id, epoch, owner))
        try:
            yield
        finally:
            task.cancel()

    async def _renew(self, session_id: str, epoch: int, owner: str) -> None:
        while True:
            try:
                await self.save(session_id, epoch, owner, {})
            except FleetError as error:
                log.warning(
                    "session %s: its place in the queue could not be renewed: %s",
                    shown_id(session_id),
                    error.message,
                )
            await self._clock.sleep(RENEW_S)

    async def save(
        self,
        session_id: str,
        epoch: int,
        owner: str,
        fields: Mapping[str, bytes],
        removed: Sequence[str] = (),
    ) -> Saved:
        """Write fields of a session and renew it. Raises: RedisUnreachable."""
        return await self._voice.save(session_id, epoch, owner, self._ttl_s, fields, removed)

    async def was_ended(self, session_id: str, owner: str) -> bool:
        """Return True if an operator ended the session. Raises: RedisUnreachable."""
        return await self._voice.was_ended(session_id, owner)

    def delete(self, session_id: str, epoch: int | None) -> None:
        """Delete a session in the background. Without an epoch, an operator ends it."""
        self._spawn(self._delete(session_id, epoch))

    async def _delete(self, session_id: str, epoch: int | None) -> None:
        try:
            await self._voice.end(session_id, epoch)
        except FleetError as error:
            log.warning(
                "session %s: its end could not be written: %s", shown_id(session_id), error.message
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
