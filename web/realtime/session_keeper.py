"""Keeping of voice sessions beyond their end: each gateway writes what it knows of its sessions
after every change of a turn, so that a session whose gateway was killed is kept too. Knows no
socket.
"""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from fleet.core.clock import now_us
from fleet.history.sessions import KeptSession
from fleet.process.background import start
from web.gateway.gateway import Gateway
from web.realtime.recorded_sessions import SessionRecord
from web.realtime.session import Session
from web.realtime.session_views import SessionView, shown_id
from web.realtime.turn_log import TurnRecord
from web.realtime.turn_outcomes import outcome_of


class SessionKeeper:
    def __init__(self, gateway: Gateway) -> None:
        self._history = gateway.history
        self._kept: dict[str, list[tuple[object, ...]]] = {}
        """Outcome, words, underruns and number of gateways of each turn at the last write, by
        session.
        """
        self._writing = asyncio.Lock()

    async def keep(self, session: Session, view: SessionView) -> None:
        """Write a session to the history if a turn has changed since the last write."""
        turns = tuple(session.turn_log.refresh())
        facts: list[tuple[object, ...]] = [
            (turn.outcome, turn.said, turn.underruns, len(turn.gateways)) for turn in turns
        ]
        if self._history.is_enabled and self._kept.get(session.id) != facts:
            self._kept[session.id] = facts
            await self._write(_record_of(session, view, turns))

    def forget(self, session: Session) -> None:
        """Forget what was written last of a session that another gateway may continue."""
        self._kept.pop(session.id, None)

    def end(self, session: Session, view: SessionView, why: str) -> None:
        """Write in the background that a session has ended, and why."""
        self._kept.pop(session.id, None)
        if self._history.is_enabled:
            if session.responses.current is not None:
                session.turn_log.note(session.responses.current)
            record = _record_of(session, view, session.turn_log.refresh())
            ended = msgspec.structs.replace(record, ended_us=now_us(), end=why)
            start(self._write(ended), f"the keeping of voice session {shown_id(session.id)}")

    async def _write(self, record: SessionRecord) -> None:
        view = record.view
        kept = KeptSession(
            session=view.id,
            began_us=view.created_us,
            seen_us=max(view.seen_us, record.ended_us),
            ended_us=record.ended_us,
            num_turns=len(record.turns),
            key=view.key or "",
            why=troubles_of(record.turns),
            record=msgspec.msgpack.encode(record),
        )
        async with self._writing:
            await self._history.keep_session(kept)


def _record_of(session: Session, view: SessionView, turns: Iterable[TurnRecord]) -> SessionRecord:
    """Return the record of a session, without what was said if the client asked for that."""
    has_texts = session.settings.store is not False
    shown = turns if has_texts else map(without_texts, turns)
    copies = tuple(msgspec.structs.replace(turn) for turn in shown)
    return SessionRecord(view=view, turns=copies, has_texts=has_texts)


def without_texts(turn: TurnRecord) -> TurnRecord:
    """Return a turn without anything that was said or written."""
    return msgspec.structs.replace(turn, said=None, answer="", played=None, tools=[])


def troubles_of(turns: Sequence[TurnRecord]) -> tuple[str, ...]:
    """Return what went wrong in a session, each one of `fleet.history.sessions.TROUBLES`."""
    outcomes = {outcome_of(turn) for turn in turns}
    found = [name for name in ("failed", "refused") if name in outcomes]
    found += ["moved"] if any(len(turn.gateways) > 1 for turn in turns) else []
    return (*found, *(["dropouts"] if any(turn.underruns for turn in turns) else []))
