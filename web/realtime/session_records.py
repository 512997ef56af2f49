"""Records of voice sessions in Redis: which gateway holds a session, and until when. Knows no
session object and no socket.

If the client leaves while its record is being written, the record is deleted, so that no record
remains without a session.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.config.schema import LeaseConfig
from fleet.control.client import HeldVoice, Saved
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, NotFound, SecretInUse, quoted
from web.gateway.gateway import Gateway
from web.http.callers import current_caller
from web.http.errors import SessionEndedByOperator
from web.realtime.clock import Clock
from web.realtime.session_views import shown_id
from web.realtime.snapshot import STATE

log = logging.getLogger("fleet.web")

RENEW_S = 2.0
"""Seconds after which an unchanged session is written again, so that it does not expire."""
SPARE_S = 10.0
"""Seconds that a record outlives the client's time to reconnect, so that the gateway, and not
Redis, ends the session.
"""
FIRST_S = 10.0
"""Seconds until a new record expires unless it is written again. A client that left before the
first write then no longer counts toward the session limit.
"""
ABSENCE_POLL_S, ABSENCE_SPARE_S = 0.1, 0.5
ENDED = "an operator ended the session"


def absence_tries(lease: LeaseConfig) -> int:
    """Return the number of tries, `ABSENCE_POLL_S` apart, to open a session with a client secret at
    its session limit. The tries last until a gateway that died loses its lease, since the sessions
    of that gateway count until then.

    A page that is reloaded may also connect before the loss of its former connection is noticed.
    """
    return 1 + math.ceil((lease.worker_ttl_s + ABSENCE_SPARE_S) / ABSENCE_POLL_S)


Undo = Callable[[int], Coroutine[None, None, None]]
"""Function that is called if the client leaves while this gateway becomes the holder of the
session, to undo the effect; the argument is the epoch of the record.
"""


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
        """Create the record of a new session. `owner` is the credential of the client.

        Raises: SecretInUse if the client secret is at its session limit; KeyAtLimit;
        RedisUnreachable.
        """
        tries_left = absence_tries(self._gateway.config.lease)
        while True:
            try:
                held = await self._hold(
                    session_id, FIRST_S, owner, new=True, limits=current_caller().limits
                )
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
        """Restart the duration of a session after its client has waited in the queue. Returns None
        if the record is lost. Raises: RedisUnreachable.
        """
        return await self._hold(session_id, self._ttl_s, owner)

    async def take_over(self, session_id: str, owner: str) -> HeldVoice:
        """Become the holder of another gateway's session. If the caller is cancelled meanwhile, the
        session is marked as without a client, so that the client may reconnect later.

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
        limits: KeyLimits = NO_LIMITS,
    ) -> HeldVoice | None:
        """Become the holder of a session; None if `new` is False and there is no record. If the
        caller is cancelled meanwhile, call `undo`, or delete the record.

        Raises: SecretInUse, KeyAtLimit, RedisUnreachable.
        """
        holding = asyncio.ensure_future(
            self._voice.hold(session_id, ttl_s, owner, new=new, limits=limits)
        )
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
        """Renew, within this context, the record of a queued client, which counts toward the
        session limit of its client secret.
        """
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
        """Write `fields` of a session, delete the fields in `removed`, and renew the record.
        Returns `Saved.STALE` if the write was refused, and `Saved.RESTORED` if every field must be
        written again. Raises: RedisUnreachable.
        """
        return await self._voice.save(session_id, epoch, owner, self._ttl_s, fields, removed)

    async def was_ended(self, session_id: str, owner: str) -> bool:
        """Return True if an operator ended the session. Raises: RedisUnreachable."""
        return await self._voice.was_ended(session_id, owner)

    async def until_over(self, session_id: str) -> None:
        """Return once no gateway holds the session, and none can continue it.

        Redis may lose a record, and its holder writes it again. So the record must be absent for
        `SPARE_S`, and while Redis is unreachable it counts as present.
        """
        present_at = self._clock.now()
        while self._clock.now() - present_at < SPARE_S:
            await self._clock.sleep(RENEW_S)
            try:
                is_present = await self._voice.exists(session_id)
            except FleetError:
                is_present = True
            if is_present:
                present_at = self._clock.now()

    def delete(self, session_id: str, epoch: int | None) -> None:
        """Delete the record of a session in the background. Without an epoch, the session is
        recorded as ended by an operator.
        """
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
