"""All voice sessions of this gateway: who is let in, waits in line, or may come back, and writing them down for other gateways.

Knows no protocol of a socket.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from fleet.core.errors import FleetError, NotFound, Overloaded, quoted
from web.errors import SessionEnded
from web.gateway import Gateway
from web.realtime import vad
from web.realtime.line import Port
from web.realtime.server_events import SessionCreated, new_id
from web.realtime.session import Session, Shared, Watch
from web.realtime.settings import Settings
from web.realtime.store import Snapshot, restore, resumed

log = logging.getLogger("fleet.web")

RENEW_S = 2.0
"""A session that does not change is written down as often, so that it is known to be alive."""
SETTLE_S = 0.1
"""Changes that come together are written together."""
LET_GO_S = 2.0
ENDED = "an operator ended the session"
SPARE_S = 10.0
"""How much longer than its client a session lives in Redis, so that the gateway is the one to end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a client that comes back has of a response: samples of its sound, characters of its words; None: it does not say."""

    response_id: str | None
    samples: int | None
    chars: int | None


@dataclass(slots=True, eq=False)
class Place:
    """A session this gateway holds."""

    session: Session
    epoch: int
    snapshot: Snapshot
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    on_position: Callable[[int], None]
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class Hall:
    def __init__(self, gateway: Gateway) -> None:
        vad.model()
        self._gateway = gateway
        self._voice = gateway.config.voice
        self._places: dict[str, Place] = {}
        self._line: list[Waiter] = []
        self._coming = 0
        """Let in, but not seated yet."""
        self._shared = Shared()
        self._ending: set[asyncio.Task[None]] = set()
        self.early_bytes = 0
        """Bytes that the clients in line have sent."""

    @property
    def sessions(self) -> dict[str, Session]:
        return {name: place.session for name, place in self._places.items()}

    # coming

    async def enter(self, port: Port, settings: Settings, on_position: Callable[[int], None]) -> Session:
        """A new session, once there is room. `on_position` is called with the place in line, and whenever it changes.

        Raises: Overloaded if the line is full too; RedisUnreachable.
        """
        async with self._room(on_position):
            settings = msgspec.structs.replace(settings, id=new_id("sess"), model=self._gateway.model)
            held = await self._gateway.client.hold_voice(settings.id, self._keep_s, new=True)
            assert held is not None, "two sessions of one name"
            place = self._seat(lambda watch: Session(self._gateway, settings, self._shared, watch), held.epoch, Snapshot())
        place.session.line.attach(port)
        place.session.line.tell(SessionCreated(session=place.session.settings))
        place.session.note()
        return place.session

    async def resume(self, session_id: str, port: Port, received: Received) -> Session:
        """Go on with a session whose connection was lost, here or on another gateway.

        Raises: NotFound, Overloaded, RedisUnreachable.
        """
        place = self._places.get(session_id)
        if place is None:
            place = await self._take_over(session_id, received)
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

    async def _take_over(self, session_id: str, received: Received) -> Place:
        held = await self._gateway.client.hold_voice(session_id, self._keep_s)
        if held is None and await self._gateway.client.voice_ended(session_id):
            raise SessionEnded(ENDED, param="session")
        if held is None:
            raise NotFound(f"session: no session {quoted(session_id)}; it never was, or is over. Begin another", param="session")
        place = self._seat(
            lambda watch: restore(self._gateway, held.fields, self._shared, watch), held.epoch, Snapshot(held.fields)
        )
        run = place.session.replies.active
        if run is not None and run.id == received.response_id and received.chars is not None:
            # Words are told faster than they are written down: what was told last its client alone knows.
            run.sent_chars = received.chars
        return place

    def _seat(self, make: Callable[[Watch], Session], epoch: int, snapshot: Snapshot) -> Place:
        changed = asyncio.Event()
        session = make(Watch(changed=changed.set))
        place = Place(session=session, epoch=epoch, snapshot=snapshot, changed=changed)
        place.keeper = asyncio.create_task(self._keep(place))
        self._places[session.id] = place
        return place

    @contextlib.asynccontextmanager
    async def _room(self, on_position: Callable[[int], None]) -> AsyncIterator[None]:
        if self._full or self._line:
            if len(self._line) >= self._voice.max_waiting:
                most = self._voice.max_sessions + self._voice.max_waiting
                raise Overloaded(f"{most} voice sessions are open or waiting on this gateway; try again shortly")
            await self._wait_in_line(Waiter(on_position))
        else:
            self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1
            self._call_next()

    async def _wait_in_line(self, waiter: Waiter) -> None:
        """Afterwards its place is counted among those that are coming."""
        self._line.append(waiter)
        waiter.on_position(len(self._line))
        try:
            await waiter.turn.wait()
        except asyncio.CancelledError:
            if waiter in self._line:
                self._line.remove(waiter)
                self._tell_positions()
            else:
                self._coming -= 1
                self._call_next()
            raise

    @property
    def _full(self) -> bool:
        return len(self._places) + self._coming >= self._voice.max_sessions

    def _call_next(self) -> None:
        called = False
        while self._line and not self._full:
            waiter = self._line.pop(0)
            self._coming += 1
            waiter.turn.set()
            called = True
        if called:
            self._tell_positions()

    def _tell_positions(self) -> None:
        for position, waiter in enumerate(self._line, 1):
            waiter.on_position(position)

    # going

    def lost(self, session: Session, port: Port) -> None:
        """The connection is gone: the session waits for its client, for so long."""
        place = self._places.get(session.id)
        if place is None or not session.line.is_of(port):
            return
        session.line.detach()
        session.note()
        if not self._gateway.closing.is_set():
            loop = asyncio.get_running_loop()
            place.expiry = loop.call_later(self._voice.resume_s, self.end, session.id)

    def left(self, session: Session, port: Port) -> None:
        """The client said goodbye: everything for it stops."""
        if session.line.is_of(port):
            self.end(session.id)

    def end(self, session_id: str, *, by_operator: bool = False) -> bool:
        """Return True if there was such a session here. `by_operator`: a client that comes back learns so."""
        place = self._places.get(session_id)
        if place is None:
            return False
        self._remove(place)
        place.session.line.hang_up(1000, ENDED if by_operator else "the session is over")
        place.session.abandon()
        task = asyncio.create_task(self._forget(place, None if by_operator else place.epoch))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return True

    async def _forget(self, place: Place, epoch: int | None) -> None:
        try:
            await self._gateway.client.end_voice(place.session.id, epoch)
        except FleetError as error:
            log.warning("session %s: its end could not be written: %s", place.session.id, error.message)

    def _remove(self, place: Place) -> None:
        self._places.pop(place.session.id, None)
        if place.expiry is not None:
            place.expiry.cancel()
        if place.keeper is not None and place.keeper is not asyncio.current_task():
            place.keeper.cancel()
        self._call_next()

    # writing down

    @property
    def _keep_s(self) -> float:
        return self._voice.resume_s + SPARE_S

    async def _keep(self, place: Place) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await place.changed.wait()
                await asyncio.sleep(SETTLE_S)
            place.changed.clear()
            try:
                if not await self._write(place):
                    self._give_up(place, ended=await self._gateway.client.voice_ended(place.session.id))
                    return
            except FleetError as error:
                place.snapshot.forget()
                log.warning("session %s: could not be written down: %s", place.session.id, error.message)

    async def _write(self, place: Place) -> bool:
        fields, gone = place.snapshot.changes(place.session)
        view = msgspec.json.encode(place.session.view(self._gateway.client.id))
        return await self._gateway.client.keep_voice(place.session.id, place.epoch, self._keep_s, {**fields, "view": view}, gone)

    def _give_up(self, place: Place, *, ended: bool) -> None:
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
