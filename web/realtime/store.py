"""A session written down, so that any gateway can go on with it: as fields of a hash, sound apart, and only what changed.

Knows no Redis: the fields go through the gateway's client.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from fleet.core.errors import UnknownWireVersion
from fleet.core.ids import RequestId
from web.gateway.gateway import Gateway
from web.realtime.conversation import Clip, Item
from web.realtime.generation import Generation
from web.realtime.heard import SpeakingRate
from web.realtime.response_stream import ResponsePlan, ResponseStream, TurnTimestamps
from web.realtime.server_events import Resumed
from web.realtime.session import Session, SessionCallbacks, Shared
from web.realtime.settings import Settings

STATE, CLIP = "state", "clip:"
VERSION = 1


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    response_id: str
    item_id: str
    request_id: str
    active: bool
    sent_samples: int
    sent_chars: int
    plan: ResponsePlan


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    conversation_id: str
    created_us: int
    turns: int
    settings: Settings
    items: list[Item]
    run: RunState | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionState).decode


class Snapshot:
    """What was last written of a session. `changes` says what to write next."""

    def __init__(self, fields: Mapping[str, bytes] | None = None) -> None:
        self._state = (fields or {}).get(STATE, b"")
        self._clips = {name for name in fields or {} if name.startswith(CLIP)}

    def changes(self, session: Session) -> tuple[dict[str, bytes], list[str]]:
        """Fields to write and to delete, taken as written from now on."""
        fields: dict[str, bytes] = {}
        state = _encode(_state(session))
        if state != self._state:
            self._state = fields[STATE] = state
        clips = {CLIP + name: clip for name, clip in session.conversation.clips.items()}
        fields |= {name: clip.pcm for name, clip in clips.items() if name not in self._clips}
        gone = sorted(self._clips - clips.keys())
        self._clips = set(clips)
        return fields, gone

    def forget(self) -> None:
        """Whether the last changes were written is not known: all of it is written again."""
        self._state, self._clips = b"", set()


def _state(session: Session) -> SessionState:
    run = session.replies.run
    return SessionState(
        version=VERSION,
        conversation_id=session.conversation_id,
        created_us=session.created_us,
        turns=session.story.turns,
        settings=session.settings,
        items=session.conversation.items,
        run=_run_state(run) if run is not None else None,
    )


def _run_state(run: ResponseStream) -> RunState:
    return RunState(
        response_id=run.id, item_id=run.item_id, request_id=run.making.request_id, active=run.active,
        sent_samples=run.playhead.sent, sent_chars=run.sent_chars, plan=run.plan,
    )  # fmt: skip


def restore(gateway: Gateway, fields: Mapping[str, bytes], shared: Shared, watch: SessionCallbacks) -> Session:
    """The session as its last holder wrote it; an answer under way is taken over too, and told from where it was.

    Raises: UnknownWireVersion if another version wrote it.
    """
    try:
        state = _decode(fields[STATE])
    except (KeyError, msgspec.DecodeError) as error:
        raise UnknownWireVersion(f"the session cannot be read ({error}); are all gateways of one version?") from error
    session = Session(gateway, state.settings, shared, watch, state.conversation_id)
    session.created_us, session.story.turns = state.created_us, state.turns
    conversation = session.conversation
    conversation.items = list(state.items)
    conversation.clips = {name.removeprefix(CLIP): Clip(pcm) for name, pcm in fields.items() if name.startswith(CLIP)}
    if state.run is not None:
        _restore_run(gateway, session, state.run, shared.rate)
    return session


def _restore_run(gateway: Gateway, session: Session, told: RunState, rate: SpeakingRate) -> None:
    making = Generation(gateway, None, RequestId(told.request_id))
    making.take_over()
    run = ResponseStream(
        replace(told.plan), making, session.conversation, session.replies, lead_s=gateway.config.voice.send_ahead_s, rate=rate,
        marks=TurnTimestamps(first_sent=0.0 if told.sent_samples or told.sent_chars else None),
        response_id=told.response_id, item_id=told.item_id,
    )  # fmt: skip
    run.item = next((item for item in session.conversation.items if item.id == told.item_id), None)
    run.sent_chars = told.sent_chars
    run.playhead.rewind(told.sent_samples)
    if told.active:
        session.replies.adopt(run)
    else:
        run.status = "completed"
        session.replies.run = run


def resumed(session: Session) -> Resumed:
    run = session.replies.run
    active = run if run is not None and run.active else None
    # One that was taken over has no words yet: they are told from where its client has them.
    known = active is not None and len(active.text) >= active.sent_chars
    return Resumed(
        session_id=session.id,
        response_id=active.id if active is not None else None,
        item_id=active.item_id if active is not None else None,
        transcript=active.text[: active.sent_chars] if active is not None and known else "",
    )
