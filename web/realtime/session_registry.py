"""Registry of the voice sessions of this gateway: admission, resumption after a lost connection,
storage for other gateways.

Knows no protocol of a socket; accesses records in Redis only through `session_records`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fleet.control.client import HeldVoice, Saved
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, Overloaded
from fleet.process.background import start
from fleet.processing import voice_activity
from web.gateway.gateway import Gateway
from web.http.errors import SessionExpired, SessionIdle
from web.realtime import session_records
from web.realtime.admission import Admission
from web.realtime.clock import Clock, Timer
from web.realtime.context import SharedAudio
from web.realtime.protocol.server_events import SessionCreated, new_id
from web.realtime.protocol.settings import Settings
from web.realtime.protocol.transcription_session import session_body
from web.realtime.session import Session
from web.realtime.session_keeper import SessionKeeper
from web.realtime.session_records import ENDED, SessionRecords
from web.realtime.session_views import SessionView, shown_id
from web.realtime.snapshot import Snapshot, restore, resumed
from web.realtime.transport.client_connection import ClientWriter
from web.realtime.transport.client_secrets import (
    is_of_secret,
    key_name,
    short_name,
)
from web.realtime.transport.refusal import close_code, close_reason, error_event

log = logging.getLogger("fleet.web")

SETTLE_S = 0.1
"""Seconds for which changes are collected before they are written together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Report of a reconnecting client: how many samples of audio and characters of text it has
    received of a response; None if not reported.
    """

    response_id: str | None
    samples: int | None
    chars: int | None


@dataclass(slots=True, eq=False)
class SessionEntry:
    """A session that this gateway holds, with the state of its storage and limits. `owner` is the
    credential that opened it, in the form of `fleet.control.voice.hold`.

    Units: `began_at` and `active_at` in seconds of the clock, `away_us` in microseconds since 1970.
    """

    session: Session
    owner: str
    snapshot: Snapshot
    began_at: float
    active_at: float
    """Time of the last input from the client, or of the last output to it."""
    num_frames: int = 0
    away_us: int | None = None
    """Time at which the client disconnected; None while it is connected."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.Task[None] | None = None
    expiry: Timer | None = None

    @property
    def epoch(self) -> int:
        """Epoch at which this gateway holds the session; Redis refuses the writes of earlier
        holders.
        """
        return self.session.context.epoch

    def hold_at(self, epoch: int) -> None:
        self.session.context.epoch = epoch


class SessionRegistry:
    def __init__(self, gateway: Gateway, clock: Clock | None = None) -> None:
        voice_activity.model()
        self._gateway = gateway
        self._voice = gateway.config.voice
        self._clock = clock or Clock()
        self._entries: dict[str, SessionEntry] = {}
        self._admission = Admission(
            self._voice.max_sessions, self._voice.max_waiting, self._voice.secret_share
        )
        self._shared = SharedAudio()
        self._records = SessionRecords(gateway, self._clock)
        self._keeper = SessionKeeper(gateway)
        self.early_bytes = 0
        """Bytes that all queued clients have sent, which are stored until the clients are admitted.
        """

    @property
    def sessions(self) -> dict[str, Session]:
        return {session_id: entry.session for session_id, entry in self._entries.items()}

    # opening

    async def enter(
        self,
        writer: ClientWriter,
        settings: Settings,
        owner: str,
        on_position: Callable[[int], None],
    ) -> Session:
        """Open a new session with the credential `owner`, after waiting in the queue if the gateway
        is full. `writer` is the client's socket; `on_position` is called with each new position in
        the queue.

        Raises: Overloaded if the queue is full; SecretInUse; KeyAtLimit; RedisUnreachable.
        """
        try:
            return await self._enter(writer, settings, owner, on_position)
        except Overloaded as error:
            self._gateway.client.telemetry.record_refusal(error)
            raise

    async def _enter(
        self,
        writer: ClientWriter,
        settings: Settings,
        owner: str,
        on_position: Callable[[int], None],
    ) -> Session:
        settings = msgspec.structs.replace(settings, id=new_id("sess"), model=self._gateway.model)
        held = await self._records.create(settings.id, owner)
        for replaced_id in held.replaced:
            self.end(replaced_id)
        try:
            held = await self._wait_for_admission(settings.id, held, owner, on_position)
            entry = self._add(
                lambda changed: Session(
                    self._gateway, settings, self._shared, self._clock, changed
                ),
                owner,
                held,
            )
        except BaseException:
            self._records.delete(settings.id, held.epoch)
            raise
        session = entry.session
        session.connection.attach(writer)
        session.connection.send(SessionCreated(session=session_body(session.settings)))
        session.publish()
        return session

    async def _wait_for_admission(
        self, session_id: str, held: HeldVoice, owner: str, on_position: Callable[[int], None]
    ) -> HeldVoice:
        """Wait until the gateway admits the session. After a wait in the queue, its record is held
        again, so that its duration counts from now.

        Raises: Overloaded, RedisUnreachable.
        """
        by_secret = is_of_secret(owner)
        queued = self._admission.join(by_secret=by_secret, on_position=on_position)
        if queued.admitted.is_set():
            return held
        async with self._records.renewing(session_id, held.epoch, owner):
            await self._admission.wait(queued)
        try:
            again = await self._records.hold_again(session_id, owner)
            if again is None:
                raise Overloaded("the place in line was lost while Redis was away; try again")
        except BaseException:
            self._admission.release(by_secret=by_secret)
            raise
        return again

    async def resume(
        self, session_id: str, writer: ClientWriter, received: Received, owner: str
    ) -> Session:
        """Continue a session whose connection was lost, on this gateway or another gateway.
        `writer` is the client's new socket, `owner` its credential, and `received` what it has
        received of a response.

        Raises: NotFound, also for a session of another owner; SessionEndedByOperator,
        RedisUnreachable.
        """
        entry = self._entries.get(session_id)
        if entry is None or entry.owner != owner or not await self._is_still_held(entry):
            # Another owner's session that is held here looks, and takes as long, as one that never
            # existed.
            entry = await self._take_over(session_id, received, owner)
        entry.active_at, entry.away_us = self._clock.now(), None
        session, connection = entry.session, entry.session.connection
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        connection.attach(writer)
        connection.send(SessionCreated(session=session_body(session.settings)))
        # The transcript of `resumed` includes the missed deltas: sent after it, they would be read
        # twice.
        connection.send_missed()
        connection.send(resumed(session))
        response = session.responses.current
        if response is not None:
            is_playable = session.settings.audio.output.format is not None
            if is_playable and received.samples is not None and response.id == received.response_id:
                response.resend_from(received.samples)
            elif response.is_active:
                response.generation.wake()
        session.publish()
        return session

    async def _is_still_held(self, entry: SessionEntry) -> bool:
        """Return True if this gateway still holds the session. Otherwise (another gateway continued
        the session, or another session replaced it) remove the entry and return False.
        """
        session_id = entry.session.id
        try:
            held = await self._save(entry, {}, ["away_us"])
        except FleetError as error:
            log.warning(
                "session %s: continued although Redis does not answer: %s",
                shown_id(session_id),
                error.message,
            )
            return True
        is_here = self._entries.get(session_id) is entry
        if is_here and not held:
            self._give_up(entry, ended=False)
        return held and is_here

    async def _take_over(self, session_id: str, received: Received, owner: str) -> SessionEntry:
        held = await self._records.take_over(session_id, owner)
        entry = self._entries.get(session_id)
        if entry is not None:
            # Another connection of the same client was faster.
            assert entry.owner == owner, "Redis and this gateway agree on the owner"
            entry.hold_at(held.epoch)
            return entry
        self._admission.add(by_secret=is_of_secret(owner))
        received_of = received.response_id if received.samples or received.chars else None

        def restored(changed: Callable[[], None]) -> Session:
            return restore(
                self._gateway, held.fields, self._shared, self._clock, changed, received=received_of
            )

        entry = self._add(restored, owner, held)
        response = entry.session.responses.active
        if (
            response is not None
            and response.id == received.response_id
            and received.chars is not None
        ):
            # Text is sent faster than the session is written: only the client knows what it has
            # received.
            response.sent_chars = received.chars
        return entry

    def _add(
        self, make: Callable[[Callable[[], None]], Session], owner: str, held: HeldVoice
    ) -> SessionEntry:
        """Add an admitted session. `make` creates the session; its argument is the function to call
        after each change. If `make` fails, the admission is released.
        """
        changed = asyncio.Event()
        try:
            session = make(changed.set)
        except BaseException:
            self._admission.release(by_secret=is_of_secret(owner))
            raise
        now = self._clock.now()
        entry = SessionEntry(
            session=session,
            owner=owner,
            snapshot=Snapshot(held.fields),
            began_at=now - held.age_s,
            active_at=now,
            changed=changed,
        )
        entry.hold_at(held.epoch)
        entry.writer = start(
            self._write_changes(entry), f"the writer of voice session {shown_id(session.id)}"
        )
        self._entries[session.id] = entry
        return entry

    # closing

    def on_lost(self, session: Session, writer: ClientWriter) -> None:
        """Keep the session of a lost connection for as long as its client may reconnect."""
        entry = self._entries.get(session.id)
        if entry is None or not session.connection.is_attached_to(writer):
            return
        session.connection.detach()
        entry.away_us = now_us()
        session.publish()
        if not self._gateway.closing.is_set():
            entry.expiry = self._clock.call_later(
                self._voice.reconnect_timeout_s,
                lambda: start(self._expire(entry), f"voice session {shown_id(session.id)}"),
            )

    async def _expire(self, entry: SessionEntry) -> None:
        """End a session whose client did not reconnect here, unless it did at another gateway."""

        def is_away() -> bool:
            return self._entries.get(entry.session.id) is entry and entry.away_us is not None

        while is_away():
            try:
                is_held = await self._save(entry, {}, ())
            except FleetError:
                await self._clock.sleep(session_records.RENEW_S)
                continue
            if not is_away():
                return
            if is_held:
                self.end(entry.session.id)
            else:
                self._give_up(entry, ended=False)

    def on_closed(self, session: Session, writer: ClientWriter) -> None:
        """End the session of a client that closed its connection properly."""
        if session.connection.is_attached_to(writer):
            self.end(session.id)

    def owner_of(self, session_id: str) -> str | None:
        """Return the owner of a session of this gateway; None if there is none with this id."""
        entry = self._entries.get(session_id)
        return entry.owner if entry is not None else None

    def end(self, session_id: str, *, by_operator: bool = False) -> bool:
        """End a session of this gateway; return False if there is none with this id. If
        `by_operator` is True, a client that reconnects is sent an error that an operator ended the
        session.
        """
        entry = self._entries.get(session_id)
        if entry is None:
            return False
        self._close(
            entry,
            1000,
            ENDED if by_operator else "the session is over",
            None if by_operator else entry.epoch,
        )
        return True

    def _close(self, entry: SessionEntry, code: int, reason: str, epoch: int | None) -> None:
        self._remove(entry)
        self._keeper.end(entry.session, self._view(entry), reason)
        entry.session.connection.close(code, reason)
        entry.session.stop()
        self._records.delete(entry.session.id, epoch)

    def _remove(self, entry: SessionEntry) -> None:
        if self._entries.get(entry.session.id) is not entry:
            return
        del self._entries[entry.session.id]
        if entry.expiry is not None:
            entry.expiry.cancel()
        if entry.writer is not None and entry.writer is not asyncio.current_task():
            entry.writer.cancel()
        self._admission.release(by_secret=is_of_secret(entry.owner))

    # limits

    def _exceeded(self, entry: SessionEntry) -> SessionExpired | SessionIdle | None:
        """Return the error for the time limit that a session has reached (duration, idle time), or
        None. Activity since the last check restarts the idle time; a client that receives a
        response, or is disconnected, counts as active.
        """
        now, session = self._clock.now(), entry.session
        if (
            session.num_frames != entry.num_frames
            or session.responses.is_busy
            or not session.connection.is_attached
        ):
            entry.num_frames, entry.active_at = session.num_frames, now
        if now - entry.began_at >= self._voice.max_session_s:
            return SessionExpired(
                f"Your session hit the maximum duration of {_duration(self._voice.max_session_s)}. "
                "Begin another one (voice.max_session_s sets the bound)"
            )
        if now - entry.active_at >= self._voice.idle_s:
            return SessionIdle(
                f"nothing was sent or played for {_duration(self._voice.idle_s)} "
                "(voice.idle_s); begin another session"
            )
        return None

    # storing

    async def _write_changes(self, entry: SessionEntry) -> None:
        """Write the session to Redis whenever it changes, and at least every `RENEW_S`, until it
        ends or reaches a time limit.
        """
        session = entry.session
        while True:
            if (error := self._exceeded(entry)) is not None:
                log.info("session %s ends: %s", shown_id(session.id), error.message)
                session.connection.send(error_event(error))
                self._close(entry, close_code(error), close_reason(error), entry.epoch)
                return
            due_s = entry.began_at + self._voice.max_session_s - self._clock.now()
            if await self._clock.wait(entry.changed, min(session_records.RENEW_S, max(0.0, due_s))):
                await self._clock.sleep(SETTLE_S)
            entry.changed.clear()
            try:
                if not await self._write(entry):
                    ended = await self._records.was_ended(session.id, entry.owner)
                    self._give_up(entry, ended=ended)
                    return
            except FleetError as error:
                entry.snapshot.forget()
                log.warning(
                    "session %s: could not be written to Redis: %s",
                    shown_id(session.id),
                    error.message,
                )

    async def _write(self, entry: SessionEntry) -> bool:
        """Write the changes of a session. Returns False if this gateway no longer holds the
        session.

        Raises: RedisUnreachable.
        """
        fields, removed = entry.snapshot.changes(entry.session)
        view = self._view(entry)
        fields["view"] = msgspec.json.encode(view)
        if entry.away_us is None:
            removed.append("away_us")
        else:
            fields["away_us"] = str(entry.away_us).encode()
        is_held = await self._save(entry, fields, removed)
        if is_held:
            await self._keeper.keep(entry.session, view)
        return is_held

    def _view(self, entry: SessionEntry) -> SessionView:
        view = entry.session.view(self._gateway.client.id, short_name(entry.owner))
        return msgspec.structs.replace(view, key=key_name(entry.owner))

    async def _save(
        self, entry: SessionEntry, fields: Mapping[str, bytes], removed: Sequence[str]
    ) -> bool:
        """Write `fields` of a session and delete the fields in `removed`. Returns False if this
        gateway no longer holds the session.

        Raises: RedisUnreachable.
        """
        saved = await self._records.save(
            entry.session.id, entry.epoch, entry.owner, fields, removed
        )
        if saved is Saved.RESTORED:
            log.warning(
                "session %s: Redis lost writes of it; everything is written again",
                shown_id(entry.session.id),
            )
            entry.snapshot.forget()
            entry.changed.set()
        return saved is not Saved.STALE

    def _give_up(self, entry: SessionEntry, *, ended: bool) -> None:
        """Remove a session that this gateway no longer holds: another gateway continues it, or, if
        `ended` is True, an operator ended it together with its requests.
        """
        session = entry.session
        self._remove(entry)
        if ended:
            self._keeper.end(session, self._view(entry), ENDED)
            session.connection.close(1000, ENDED)
            session.stop()
            return
        self._keeper.forget(session)
        session.connection.close(1001, "the session continues at another gateway, or is over")
        session.detach()
        if session.responses.is_generating:
            start(self._stop_when_over(session), f"the end of voice session {shown_id(session.id)}")

    async def _stop_when_over(self, session: Session) -> None:
        """Stop a session that another gateway holds, once no gateway holds it. Until then the
        session's requests belong to the holder, even while the holder waits for Redis or hangs.
        This gateway cannot abort requests that the holder has taken over.
        """
        await self._records.until_over(session.id)
        session.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f} minutes" if minutes > 1 and not rest else f"{seconds:g} seconds"
