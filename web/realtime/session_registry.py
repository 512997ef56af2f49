"""All voice sessions of this gateway: who is let in, waits in line, or may come back, and writing them down for other gateways.

Knows no protocol of a socket.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import msgspec

from fleet.config.schema import LeaseConfig
from fleet.control.client import HeldVoice
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, NotFound, Overloaded, SecretInUse, quoted
from web.gateway.gateway import Gateway
from web.http.errors import SessionEndedByOperator, SessionExpired, SessionIdle
from web.realtime import vad
from web.realtime.admission import Admission
from web.realtime.client_connection import Port
from web.realtime.refusal import close_code, close_reason, error_event
from web.realtime.secrets import API_KEY, short_name
from web.realtime.server_events import SessionCreated, new_id
from web.realtime.session import Session, SessionCallbacks, Shared
from web.realtime.settings import Settings
from web.realtime.store import STATE, Snapshot, restore, resumed
from web.realtime.story import shown_id

log = logging.getLogger("fleet.web")

RENEW_S = 2.0
"""A session that does not change is written down as often, so that it is known to be alive."""
SETTLE_S = 0.1
"""Changes that come together are written together."""
LET_GO_S = 2.0
ENDED = "an operator ended the session"
SPARE_S = 10.0
"""How much longer than its client a session lives in Redis, so that the gateway is the one to end it."""
FIRST_S = 10.0
"""A new session lives so long in Redis until it is first written: one whose client left meanwhile is soon not counted."""
ABSENCE_POLL_S, ABSENCE_SPARE_S = 0.1, 0.5


def absence_tries(lease: LeaseConfig) -> int:
    """Number of tries for a secret in use, `ABSENCE_POLL_S` apart: they outlast the lease of a gateway that died.

    A page that is reloaded, too, may be faster than the news that its former connection is gone.
    """
    return 1 + math.ceil((lease.worker_ttl_s + ABSENCE_SPARE_S) / ABSENCE_POLL_S)


Undo = Callable[[str, int], Coroutine[None, None, None]]
"""Callback for a session, given by name and epoch, whose client left while it was being held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a client that comes back has of a response: samples of its sound, characters of its words; None: it does not say."""

    response_id: str | None
    samples: int | None
    chars: int | None


@dataclass(slots=True, eq=False)
class SessionEntry:
    """A session this gateway holds. `owner`: the credential that opened it, as `fleet.control.voice.hold` names it.

    Units: `began_at` and `active_at` in seconds of the hall's clock, `away_us` since 1970.
    """

    session: Session
    owner: str
    epoch: int
    snapshot: Snapshot
    began_at: float
    active_at: float
    """Time of the last input from its client, or of the last output to it."""
    num_received: int = 0
    away_us: int | None = None
    """Since when its client is away."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None


class SessionRegistry:
    def __init__(self, gateway: Gateway, clock: Callable[[], float] = time.monotonic) -> None:
        vad.model()
        self._gateway = gateway
        self._voice = gateway.config.voice
        self._clock = clock
        self._places: dict[str, SessionEntry] = {}
        self._admission = Admission(self._voice)
        self._shared = Shared()
        self._trying: set[str] = set()
        """Secrets in use for which a client waits until a former connection is known to be gone."""
        self._ending: set[asyncio.Task[None]] = set()
        self.early_bytes = 0
        """Bytes that the clients in line have sent."""

    @property
    def sessions(self) -> dict[str, Session]:
        return {name: place.session for name, place in self._places.items()}

    # coming

    async def enter(self, port: Port, settings: Settings, owner: str, on_position: Callable[[int], None]) -> Session:
        """A new session of `owner`, once there is room. `on_position` is called with the place in line, and whenever it changes.

        Raises: Overloaded if the line is full too; SecretInUse; RedisUnreachable.
        """
        settings = msgspec.structs.replace(settings, id=new_id("sess"), model=self._gateway.model)
        held = await self._hold_new(settings.id, owner)
        for name in held.replaced:
            self.end(name)
        try:
            held = await self._wait_for_place(settings.id, held, owner, on_position)
            place = self._seat(lambda watch: Session(self._gateway, settings, self._shared, watch), owner, held)
        except BaseException:
            self._spawn(self._forget(settings.id, held.epoch))
            raise
        place.session.line.attach(port)
        place.session.line.tell(SessionCreated(session=place.session.settings))
        place.session.note()
        return place.session

    async def _hold_new(self, name: str, owner: str) -> HeldVoice:
        """Create the record of a session. Raises: SecretInUse, RedisUnreachable."""
        tries_left = absence_tries(self._gateway.config.lease)
        while True:
            try:
                held = await self._hold(name, FIRST_S, owner, self._forget, new=True)
                assert held is not None, "two sessions of one name"
                return held
            except SecretInUse:
                tries_left -= 1
                if owner in self._trying or tries_left <= 0:
                    raise
            self._trying.add(owner)
            try:
                await asyncio.sleep(ABSENCE_POLL_S)
            finally:
                self._trying.discard(owner)

    async def _hold(self, name: str, keep_s: float, owner: str, undo: Undo, *, new: bool = False) -> HeldVoice | None:
        """Take a session; where the caller is cancelled meanwhile, `undo` it. Raises: SecretInUse, RedisUnreachable."""
        holding = asyncio.ensure_future(self._gateway.client.voice.hold(name, keep_s, owner, new=new))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            self._spawn(self._undo(name, holding, undo))
            raise

    async def _undo(self, name: str, holding: asyncio.Future[HeldVoice | None], undo: Undo) -> None:
        with contextlib.suppress(FleetError):
            held = await holding
            if held is not None:
                await undo(name, held.epoch)

    async def _mark_away(self, name: str, epoch: int) -> None:
        """A client that left while its session was taken over may come back, or begin another one."""
        await self._gateway.client.voice.save(name, epoch, self._keep_s, {"away_us": str(now_us()).encode()})

    async def _wait_for_place(self, name: str, held: HeldVoice, owner: str, on_position: Callable[[int], None]) -> HeldVoice:
        """Take a place in the gateway; after a wait in line the session is held once more, since its time begins then.

        Raises: Overloaded, RedisUnreachable.
        """
        by_secret = owner != API_KEY
        waiter = self._admission.join(by_secret=by_secret, on_position=on_position)
        if waiter.turn.is_set():
            return held
        renewing = asyncio.create_task(self._renew(name, held.epoch))
        try:
            await self._admission.wait(waiter)
        finally:
            renewing.cancel()
        try:
            again = await self._hold(name, self._keep_s, owner, self._forget)
            if again is None:
                raise Overloaded("the place in line was lost while Redis was away; try again")
        except BaseException:
            self._admission.release(by_secret=by_secret)
            raise
        return again

    async def _renew(self, name: str, epoch: int) -> None:
        """A client in line counts among the sessions of its secret."""
        while True:
            try:
                await self._gateway.client.voice.save(name, epoch, self._keep_s, {})
            except FleetError as error:
                log.warning("session %s: its place in line could not be written: %s", shown_id(name), error.message)
            await asyncio.sleep(RENEW_S)

    async def resume(self, session_id: str, port: Port, received: Received, owner: str) -> Session:
        """Continue a session of `owner` whose connection was lost, here or on another gateway.

        Raises: NotFound, also for a session of another owner; SessionEnded, RedisUnreachable.
        """
        place = self._places.get(session_id)
        if place is None or place.owner != owner or not await self._still_held(place):
            # A session of another owner that is held here is as unknown, and takes as long, as one that never was.
            place = await self._take_over(session_id, received, owner)
        place.active_at, place.away_us = self._clock(), None
        session, line = place.session, place.session.line
        if place.expiry is not None:
            place.expiry.cancel()
            place.expiry = None
        line.attach(port)
        line.tell(SessionCreated(session=session.settings))
        # What was told meanwhile is in the whole text too: told after it, it would be read twice.
        line.catch_up()
        line.tell(resumed(session))
        run = session.replies.run
        if run is not None:
            playable = session.settings.audio.output.format is not None
            if playable and received.samples is not None and run.id == received.response_id:
                run.rewind(received.samples)
            elif run.active:
                run.making.poke()
        session.note()
        return session

    async def _still_held(self, place: SessionEntry) -> bool:
        """Return False, and give up the place, if another gateway continued the session or another session replaced it."""
        if place.owner == API_KEY or place.away_us is None:
            return True
        try:
            held = await self._gateway.client.voice.save(place.session.id, place.epoch, self._keep_s, {}, ["away_us"])
        except FleetError as error:
            log.warning("session %s: continued although Redis does not answer: %s", shown_id(place.session.id), error.message)
            return True
        is_here = self._places.get(place.session.id) is place
        if is_here and not held:
            self._give_up(place, ended=False)
        return held and is_here

    async def _take_over(self, session_id: str, received: Received, owner: str) -> SessionEntry:
        held = await self._hold(session_id, self._keep_s, owner, self._mark_away)
        if held is None and await self._gateway.client.voice.was_ended(session_id, owner):
            raise SessionEndedByOperator(ENDED, param="session")
        if held is None:
            raise _unknown(session_id)
        if STATE not in held.fields:
            # Its gateway died before it wrote anything of it.
            await self._forget(session_id, held.epoch)
            raise _unknown(session_id)
        place = self._places.get(session_id)
        if place is not None:
            # Another connection of the same client was faster.
            assert place.owner == owner, "Redis and this gateway agree on the owner"
            place.epoch = held.epoch
            return place
        self._admission.take(by_secret=owner != API_KEY)
        place = self._seat(lambda watch: restore(self._gateway, held.fields, self._shared, watch), owner, held)
        run = place.session.replies.active
        if run is not None and run.id == received.response_id and received.chars is not None:
            # Words are told faster than they are written down: what was told last its client alone knows.
            run.sent_chars = received.chars
        return place

    def _seat(self, make: Callable[[SessionCallbacks], Session], owner: str, held: HeldVoice) -> SessionEntry:
        """The place is taken already; it is given back if there is no session to put there."""
        changed = asyncio.Event()
        try:
            session = make(SessionCallbacks(changed=changed.set))
        except BaseException:
            self._admission.release(by_secret=owner != API_KEY)
            raise
        now = self._clock()
        place = SessionEntry(
            session=session, owner=owner, epoch=held.epoch, snapshot=Snapshot(held.fields), began_at=now - held.age_s,
            active_at=now, changed=changed,
        )  # fmt: skip
        place.keeper = asyncio.create_task(self._keep(place))
        self._places[session.id] = place
        return place

    # going

    def lost(self, session: Session, port: Port) -> None:
        """The connection is gone: the session waits for its client, for so long."""
        place = self._places.get(session.id)
        if place is None or not session.line.is_of(port):
            return
        session.line.detach()
        place.away_us = now_us()
        session.note()
        if not self._gateway.closing.is_set():
            loop = asyncio.get_running_loop()
            place.expiry = loop.call_later(self._voice.reconnect_timeout_s, self.end, session.id)

    def left(self, session: Session, port: Port) -> None:
        """The client said goodbye: everything for it stops."""
        if session.line.is_of(port):
            self.end(session.id)

    def end(self, session_id: str, *, by_operator: bool = False) -> bool:
        """Return True if there was such a session here. `by_operator`: a client that comes back learns so."""
        place = self._places.get(session_id)
        if place is None:
            return False
        self._close(place, 1000, ENDED if by_operator else "the session is over", None if by_operator else place.epoch)
        return True

    def _close(self, place: SessionEntry, code: int, reason: str, epoch: int | None) -> None:
        self._remove(place)
        place.session.line.hang_up(code, reason)
        place.session.abandon()
        self._spawn(self._forget(place.session.id, epoch))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _forget(self, name: str, epoch: int | None) -> None:
        try:
            await self._gateway.client.voice.end(name, epoch)
        except FleetError as error:
            log.warning("session %s: its end could not be written: %s", shown_id(name), error.message)

    def _remove(self, place: SessionEntry) -> None:
        if self._places.get(place.session.id) is not place:
            return
        del self._places[place.session.id]
        if place.expiry is not None:
            place.expiry.cancel()
        if place.keeper is not None and place.keeper is not asyncio.current_task():
            place.keeper.cancel()
        self._admission.release(by_secret=place.owner != API_KEY)

    # its bounds

    def _overdue(self, place: SessionEntry) -> SessionExpired | SessionIdle | None:
        """The bound that a session has reached. Its client is not idle while it is spoken to, or while it is away."""
        now, session = self._clock(), place.session
        if session.num_received != place.num_received or session.answering or not session.line.listening:
            place.num_received, place.active_at = session.num_received, now
        if now - place.began_at >= self._voice.max_session_s:
            return SessionExpired(
                f"Your session hit the maximum duration of {_duration(self._voice.max_session_s)}. "
                "Begin another one (voice.max_session_s sets the bound)"
            )
        if now - place.active_at >= self._voice.idle_s:
            return SessionIdle(
                f"nothing was sent or played for {_duration(self._voice.idle_s)} (voice.idle_s); begin another session"
            )
        return None

    def _until_due(self, place: SessionEntry) -> float:
        """Seconds until a session that does not change is looked at again."""
        return min(RENEW_S, max(0.0, place.began_at + self._voice.max_session_s - self._clock()))

    # writing down

    @property
    def _keep_s(self) -> float:
        return self._voice.reconnect_timeout_s + SPARE_S

    async def _keep(self, place: SessionEntry) -> None:
        while True:
            if (error := self._overdue(place)) is not None:
                log.info("session %s ends: %s", shown_id(place.session.id), error.message)
                place.session.line.tell(error_event(error))
                self._close(place, close_code(error), close_reason(error), place.epoch)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_due(place)):
                    await place.changed.wait()
                await asyncio.sleep(SETTLE_S)
            place.changed.clear()
            try:
                if not await self._write(place):
                    self._give_up(place, ended=await self._gateway.client.voice.was_ended(place.session.id, place.owner))
                    return
            except FleetError as error:
                place.snapshot.forget()
                log.warning("session %s: could not be written down: %s", shown_id(place.session.id), error.message)

    async def _write(self, place: SessionEntry) -> bool:
        fields, gone = place.snapshot.changes(place.session)
        view = place.session.view(self._gateway.client.id, short_name(place.owner))
        fields["view"] = msgspec.json.encode(view)
        if place.away_us is None:
            gone.append("away_us")
        else:
            fields["away_us"] = str(place.away_us).encode()
        return await self._gateway.client.voice.save(place.session.id, place.epoch, self._keep_s, fields, gone)

    def _give_up(self, place: SessionEntry, *, ended: bool) -> None:
        """Another gateway has it, or, `ended`, an operator ended it: then its requests were ended with it."""
        session = place.session
        self._remove(place)
        if ended:
            session.line.hang_up(1000, ENDED)
            session.abandon()
            return
        session.line.hang_up(1001, "the session continues at another gateway, or is over")
        session.let_go()
        # Not at once: whoever has the session now may not have taken its answer over yet. Once it has, ours cannot be aborted.
        asyncio.get_running_loop().call_later(LET_GO_S, session.abandon)


def _unknown(session_id: str) -> NotFound:
    return NotFound(f"session: no session {quoted(session_id)}; it never was, or is over. Begin another", param="session")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f} minutes" if minutes > 1 and not rest else f"{seconds:g} seconds"
