"""The turns of one voice session as a person reads them afterwards: what was said by both, how each
response ended, and what the caller waited for. Knows no Redis and no page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from fleet.core.ids import RequestId
from web.realtime.context import SessionContext
from web.realtime.conversation import Item
from web.realtime.protocol.server_events import TimingPart
from web.realtime.response_stream import CANCELLED, FAILED, ResponseStream

MAX_TURNS = 200
"""Number of the latest turns that are kept; older ones are only counted."""
MAX_CHARS = 4000
"""Maximum number of characters that a turn keeps of a text."""


class TurnRecord(msgspec.Struct, kw_only=True):
    """A turn: what the user said or wrote, and the response to it.

    `number`: place in the session, from 1. `request`, `response`: ids of the response, "" if none
    was asked for. `items`: the user's items. `has_speech`: the user spoke. `said`: the user's
    words, None while they are unknown. `answer`: text sent; `played`: part of it that was
    played before the response was cut, None for one that was not cut. `item`: item of the response.
    `outcome`: completed, cancelled, failed or incomplete; "" for a response that has not ended.
    `cause`: reason or error code of an outcome other than completed; `message`: the error.
    `continues`: the response is the rest of one that a false alarm had interrupted.
    `gateways`: gateways that delivered the response, in order. `tools`: functions that it called.
    `underruns`: dropouts that the player reported.

    Units: `began_us`, `ended_us`: microseconds since 1970, when the user's turn was found to be
    over and when the response ended. `voice_to_voice_ms`, `parts`: latency and parts of it, as in
    the event `fleet.timing`.
    """

    number: int
    request: RequestId = RequestId("")
    response: str = ""
    item: str = ""
    items: list[str] = []
    has_speech: bool = False
    said: str | None = None
    answer: str = ""
    played: str | None = None
    spoken: bool = False
    outcome: str = ""
    cause: str = ""
    message: str = ""
    continues: bool = False
    began_us: int = 0
    ended_us: int = 0
    voice_to_voice_ms: float | None = None
    parts: list[TimingPart] = []
    underruns: int = 0
    tools: list[str] = []
    gateways: list[str] = []


class TurnLog:
    """The latest turns of a session, kept up to date by its events. `to_us`: converts a time of the
    session's clock to microseconds since 1970.
    """

    def __init__(self, context: SessionContext, to_us: Callable[[float], int]) -> None:
        self.turns: list[TurnRecord] = []
        self._context, self._to_us = context, to_us

    def note(self, response: ResponseStream) -> None:
        """Update the turn of a response with what is known of it now; a response without a turn
        gets one. Responses outside of the conversation are ignored.
        """
        if not response.plan.in_conversation:
            return
        turn = self._find(response.id) or self._begin(response)
        turn.request = response.generation.request_id
        # An adopted response has not read its text again when it is adopted.
        turn.answer = response.text[: response.sent_chars][:MAX_CHARS] or turn.answer
        turn.tools = [call.name for call in response.generation.calls] or turn.tools
        gateway = self._context.gateway.client.id
        if gateway not in turn.gateways:
            turn.gateways.append(gateway)
        if response.outcome is None or turn.outcome:
            return
        turn.outcome, turn.ended_us = response.outcome, self._to_us(self._context.clock.now())
        details = response.details
        if details is not None:
            turn.cause = (details.error.code if details.error is not None else details.reason) or ""
            turn.message = details.error.message if details.error is not None else ""

    def add_timing(
        self, response_id: str, voice_to_voice_ms: float | None, parts: Sequence[TimingPart]
    ) -> None:
        if (turn := self._find(response_id)) is not None:
            turn.voice_to_voice_ms, turn.parts = voice_to_voice_ms, list(parts)

    def add_underruns(self, response_id: str, count: int) -> None:
        if (turn := self._find(response_id)) is not None:
            turn.underruns += count

    def refresh(self) -> Sequence[TurnRecord]:
        """Return the turns with the texts that are known now. If the user has said or written
        something since the last response, a turn without a response is at the end.
        """
        by_id = {item.id: item for item in self._context.conversation.items}
        waiting = [item.id for item in self._unanswered(None)]
        turns = [*self.turns]
        if waiting:
            turns.append(TurnRecord(number=self._next_number(), items=waiting))
        for turn in turns:
            self._read_texts(turn, by_id)
        return turns

    def _find(self, response_id: str) -> TurnRecord | None:
        return next((turn for turn in self.turns if turn.response == response_id), None)

    def _next_number(self) -> int:
        return self.turns[-1].number + 1 if self.turns else 1

    def _begin(self, response: ResponseStream) -> TurnRecord:
        plan = response.plan
        turn = TurnRecord(
            number=self._next_number(),
            response=response.id,
            item=response.item_id,
            items=[] if plan.own_input else [one.id for one in self._unanswered(response.item_id)],
            spoken=plan.spoken,
            continues=bool(plan.skip_samples or plan.skip_chars),
            began_us=self._to_us(response.timestamps.decided),
        )
        self.turns.append(turn)
        del self.turns[:-MAX_TURNS]
        return turn

    def _unanswered(self, before: str | None) -> Iterator[Item]:
        """Yield the user's items since the last response, up to the item `before`."""
        answered = {name for turn in self.turns for name in (*turn.items, turn.item)}
        found: list[Item] = []
        for item in self._context.conversation.items:
            if item.id == before:
                break
            if item.id in answered or item.role == "assistant":
                found = []
            elif item.role == "user":
                found.append(item)
        yield from found

    @staticmethod
    def _read_texts(turn: TurnRecord, by_id: Mapping[str, Item]) -> None:
        parts = [part for name in turn.items if name in by_id for part in by_id[name].parts]
        if parts:
            turn.has_speech = any(part.kind == "input_audio" for part in parts)
            is_known = all(part.is_heard or part.kind != "input_audio" for part in parts)
            text = " ".join(part.text for part in parts if part.text)
            turn.said = text[:MAX_CHARS] if is_known or text else turn.said
        answer = by_id.get(turn.item)
        if answer is not None and answer.parts and turn.outcome in (CANCELLED, FAILED):
            turn.played = answer.parts[0].text[:MAX_CHARS]


encode_turn = msgspec.msgpack.Encoder().encode
decode_turn = msgspec.msgpack.Decoder(TurnRecord).decode
