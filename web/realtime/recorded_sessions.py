"""Voice sessions with their turns, as they are stored while they live and as they are kept
afterwards. Knows no socket.
"""

import asyncio

import msgspec

from fleet.core.errors import NotFound, quoted
from fleet.history.sessions import TAIL_CHARS, KeptSession
from fleet.processing.voice_activity import RATE_HZ
from web.gateway.gateway import Gateway
from web.openai.audio_encoder import encode_whole
from web.realtime.session_views import HIDDEN, SessionView, read_views, shown_id
from web.realtime.snapshot import CLIP, TURN
from web.realtime.turn_log import TurnRecord, decode_turn
from web.realtime.turn_transcripts import clip_name


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A voice session with its turns, the latest 200 of them. `view`: last state. `is_live`: a
    gateway holds it, or it waits for its client.

    `ended_us`: time of the end, microseconds since 1970; 0 for a live session, and for one whose
    gateway has not written how it ended. `end`: why it ended. `has_texts`: False if the client
    asked that nothing be kept of what was said. `heard`: numbers of the turns whose speech can be
    played.
    """

    object: str = "fleet.session"
    view: SessionView
    is_live: bool = False
    turns: tuple[TurnRecord, ...] = ()
    ended_us: int = 0
    end: str = ""
    has_texts: bool = True
    heard: tuple[int, ...] = ()


class RecordedSessions:
    """Reader of the recorded sessions, for one gateway. A read-only gateway names each session by
    the end of its id, since the whole id opens the session.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._voice = gateway.client.voice

    async def read(self, session: str) -> SessionRecord:
        """Return a session that lives at any gateway, or that this host has kept. Raises: NotFound,
        RedisUnreachable.
        """
        view = next((one for one in await read_views(self._gateway) if one.id == session), None)
        if view is not None:
            return await self._live(view)
        kept = await self._gateway.history.session(self._searched(session))
        if kept is None:
            raise NotFound(
                f"no session {quoted(session)}; it never was, or is no longer kept: this server "
                "keeps sessions for history.days",
                param="session_id",
            )
        record = self._decoded(kept)
        return msgspec.structs.replace(record, view=self._named(record.view))

    async def speech(self, session: str, number: int) -> bytes:
        """Return what the caller said in a turn of a live session, as a WAV file. Raises: NotFound,
        RedisUnreachable.
        """
        record = await self.read(session)
        turn = next((turn for turn in record.turns if turn.number == number), None)
        names = [CLIP + clip_name(item) for item in turn.items] if turn is not None else []
        fields = await self._voice.read(await self._whole_id(session), names)
        pcm = b"".join(fields[name] for name in names if name in fields)
        if not pcm:
            raise NotFound(
                f"turn {number} of session {quoted(session)} has no sound, or it is no longer "
                "stored: the caller's sound is deleted when the session ends",
                param="number",
            )
        return await asyncio.to_thread(encode_whole, pcm, RATE_HZ, "wav")

    def name(self, session: str) -> str:
        """Return the id under which this gateway shows a session."""
        return shown_id(session) if self._gateway.config.web.read_only else session

    async def _live(self, view: SessionView) -> SessionRecord:
        name = await self._whole_id(view.id)
        names = await self._voice.field_names(name)
        fields = await self._voice.read(name, sorted(n for n in names if n.startswith(TURN)))
        turns = tuple(map(decode_turn, fields.values()))
        heard = (t.number for t in turns if any(CLIP + clip_name(i) in names for i in t.items))
        return SessionRecord(view=view, is_live=True, turns=turns, heard=tuple(heard))

    async def _whole_id(self, session: str) -> str:
        if not session.startswith(HIDDEN):
            return session
        names = await self._voice.views()
        return next((name for name in names if shown_id(name) == session), session)

    def _searched(self, session: str) -> str:
        """Return the id, or the end of the id, by which a kept session is found."""
        return session[-TAIL_CHARS:] if session.startswith(HIDDEN) else session

    def _named(self, view: SessionView) -> SessionView:
        return msgspec.structs.replace(view, id=self.name(view.id))

    @staticmethod
    def _decoded(kept: KeptSession) -> SessionRecord:
        try:
            return msgspec.msgpack.decode(kept.record, type=SessionRecord)
        except msgspec.DecodeError:
            raise NotFound(
                f"session {quoted(kept.session)} was kept by another version of Fleet, which this "
                "one cannot read",
                param="session_id",
            ) from None
