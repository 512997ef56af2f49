"""Stored form of a voice session, from which any gateway can continue it: fields of a Redis hash.
Audio clips and turns are fields of their own, and only changed fields are written.

Knows no Redis: the fields go through the gateway's client.
"""

from collections.abc import Callable, Mapping

import msgspec

from fleet.control.client import VoiceHold
from fleet.core.errors import UnknownWireVersion
from fleet.core.ids import RequestId
from web.gateway.gateway import Gateway
from web.realtime.clock import Clock
from web.realtime.context import SharedAudio
from web.realtime.conversation import Clip, Item
from web.realtime.generation import Generation
from web.realtime.protocol.server_events import Resumed
from web.realtime.protocol.settings import Settings
from web.realtime.response_plan import ResponsePlan, TurnTimestamps
from web.realtime.response_stream import ResponseStream
from web.realtime.session import Session
from web.realtime.turn_log import decode_turn, encode_turn

STATE, CLIP, TURN = "state", "clip:", "turn:"
VERSION = 3


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Stored form of the conversation's latest response. `seed` is the seed of its prompt, with
    which another gateway submits the request again if the request was lost; None if unknown.
    """

    response_id: str
    item_id: str
    request_id: str
    is_active: bool
    sent_samples: int
    sent_chars: int
    plan: ResponsePlan
    seed: int | None = None


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    conversation_id: str
    created_us: int
    num_turns: int
    settings: Settings
    items: list[Item]
    response: StoredResponse | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredSession).decode


class Snapshot:
    """Last written form of a session, from which `changes` computes the fields to write next."""

    def __init__(self, fields: Mapping[str, bytes] | None = None) -> None:
        self._state = (fields or {}).get(STATE, b"")
        self._clips = {name for name in fields or {} if name.startswith(CLIP)}
        self._turns = _turns_in(fields or {})

    def changes(self, session: Session) -> tuple[dict[str, bytes], list[str]]:
        """Return the fields to write and the names of fields to delete. The caller must write them,
        or call `forget` if the write fails.
        """
        fields: dict[str, bytes] = {}
        state = _encode(_stored(session))
        if state != self._state:
            self._state = fields[STATE] = state
        clips = {CLIP + name: clip for name, clip in session.context.conversation.clips.items()}
        fields |= {name: clip.pcm for name, clip in clips.items() if name not in self._clips}
        removed = sorted(self._clips - clips.keys())
        self._clips = set(clips)
        turns = {
            f"{TURN}{turn.number:06}": encode_turn(turn) for turn in session.turn_log.refresh()
        }
        fields |= {name: turn for name, turn in turns.items() if self._turns.get(name) != turn}
        removed += sorted(self._turns.keys() - turns.keys())
        self._turns = turns
        return fields, removed

    def forget(self) -> None:
        """Have `changes` return all fields next time, since the last write may have failed."""
        self._state, self._clips = b"", set()
        self._turns = {}


def _stored(session: Session) -> StoredSession:
    response = session.responses.current
    return StoredSession(
        version=VERSION,
        conversation_id=session.context.conversation_id,
        created_us=session.created_us,
        num_turns=session.stats.num_turns,
        settings=session.settings,
        items=session.context.conversation.items,
        response=_stored_response(response) if response is not None else None,
    )


def _stored_response(response: ResponseStream) -> StoredResponse:
    prompt = response.generation.prompt
    return StoredResponse(
        response_id=response.id,
        item_id=response.item_id,
        request_id=response.generation.request_id,
        is_active=response.is_active,
        sent_samples=response.playhead.sent,
        sent_chars=response.sent_chars,
        plan=response.plan,
        seed=prompt.options.seed if prompt is not None else None,
    )


def restore(
    gateway: Gateway,
    fields: Mapping[str, bytes],
    shared: SharedAudio,
    clock: Clock,
    on_change: Callable[[], None],
    *,
    received: str | None,
) -> Session:
    """Return the session that another gateway wrote as `fields`, with its response continued.
    `received` is the id of the response of which the client reports to have received something;
    None without a report.

    Raises: UnknownWireVersion if a gateway of another version wrote the fields.
    """
    try:
        stored = _decode(fields[STATE])
        turns = [decode_turn(raw) for _, raw in sorted(_turns_in(fields).items())]
    except (KeyError, msgspec.DecodeError) as error:
        raise UnknownWireVersion(
            f"the session cannot be read ({error}); are all gateways of one version?"
        ) from error
    session = Session(gateway, stored.settings, shared, clock, on_change, stored.conversation_id)
    session.created_us, session.stats.num_turns = stored.created_us, stored.num_turns
    session.turn_log.turns = [turn for turn in turns if turn.response]
    conversation = session.context.conversation
    conversation.items = list(stored.items)
    conversation.clips = {
        name.removeprefix(CLIP): Clip(pcm) for name, pcm in fields.items() if name.startswith(CLIP)
    }
    if stored.response is not None:
        _restore_response(session, stored.response, received)
    return session


def _restore_response(session: Session, stored: StoredResponse, received: str | None) -> None:
    context = session.context
    has_output = stored.sent_samples or stored.sent_chars or stored.response_id == received
    is_due = stored.is_active and not has_output
    prompt = session.responses.restored_prompt(stored.plan, stored.seed) if is_due else None
    generation = Generation(context.gateway, context.clock, prompt, RequestId(stored.request_id))
    generation.adopt(lambda: VoiceHold(session.id, context.epoch))
    response = ResponseStream(
        context,
        session.events,
        stored.plan,
        generation,
        TurnTimestamps(decided=context.clock.now()),
        response_id=stored.response_id,
        item_id=stored.item_id,
    )
    item = next((item for item in context.conversation.items if item.id == stored.item_id), None)
    session.responses.current = response
    response.adopt(
        sent_samples=stored.sent_samples,
        sent_chars=stored.sent_chars,
        item=item,
        is_active=stored.is_active,
    )
    if stored.is_active:
        session.turn_log.note(response)


def _turns_in(fields: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: raw for name, raw in fields.items() if name.startswith(TURN)}


def resumed(session: Session) -> Resumed:
    """Return the event for a client that reconnected, which names the response under way."""
    response = session.responses.active
    # The text of an adopted response may not have been read yet: it is then sent from the client's
    # position on.
    is_known = response is not None and len(response.text) >= response.sent_chars
    return Resumed(
        session_id=session.id,
        response_id=response.id if response is not None else None,
        item_id=response.item_id if response is not None else None,
        transcript=response.text[: response.sent_chars]
        if response is not None and is_known
        else "",
    )
