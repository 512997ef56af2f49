"""The page of one voice session: how it went, and its turns in order. Knows no stage by name."""

from dataclasses import dataclass, replace
from http import HTTPStatus

from fleet.core.clock import now_us
from fleet.core.errors import NotFound
from fleet.core.ids import RequestId
from fleet.graphs import Graph
from web.console.page_context import LivePage, PageContext, Query, build_path
from web.console.session_verdict import LIVE_OUTCOMES, SAID, judge_session
from web.console.verdict import AnswerVerdict
from web.gateway.gateway import Gateway
from web.realtime.protocol.server_events import TimingPart
from web.realtime.recorded_sessions import RecordedSessions, SessionRecord
from web.realtime.turn_log import TurnRecord
from web.realtime.turn_outcomes import TurnOutcome, outcome_of, waits_of

PAGE_SIZE = 20
SOUND_STORED_US = 120_000_000
"""Time after the end of an answer in which its sound may still be stored in Redis; later the sound
is only searched among kept answers.
"""
SCALE = 1000
"""Width of the drawing of a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitShare:
    """Part of a wait as drawn: its cause, and place and width in a drawing `SCALE` wide."""

    part: TimingPart
    x: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A turn as the page shows it. `speech` and `sound` are the addresses of the caller's sound and
    of the answer's, "" if they cannot be played; `no_speech` and `no_sound` say why not.
    """

    turn: TurnRecord
    outcome: TurnOutcome
    label: str
    waits: tuple[WaitShare, ...]
    total_ms: float
    said: str
    answer: str
    speech: str
    no_speech: str
    sound: str
    no_sound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSessionContext(PageContext):
    """Data of the page of one session. `record` is None for an unknown session. `earlier` and
    `latest` are the paths of other pages of its turns, "" if there are none.
    """

    id: str
    record: SessionRecord | None = None
    verdict: AnswerVerdict | None = None
    rows: tuple[TurnRow, ...] = ()
    earlier: str = ""
    latest: str = ""


class OneSessionPage(LivePage):
    key = "session"
    active = "sessions"
    path = "/sessions/{id}"
    live = ("trouble", "verdict", "summary", "turns", "pager")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._sessions = RecordedSessions(gateway)

    def empty(self, query: Query) -> OneSessionContext:
        before = query.get("before", "")
        return OneSessionContext(id=query["id"], stream_query={"id": query["id"], "before": before})

    async def read(self, query: Query) -> OneSessionContext:
        """Return the data of the session named in `query`. Raises: RedisUnreachable."""
        shown = self.empty(query)
        try:
            record = await self._sessions.read(shown.id)
        except NotFound as error:
            return replace(shown, trouble=error.message, status=HTTPStatus.NOT_FOUND)
        before = query.get("before", "")
        last = int(before) if before.isdecimal() and len(before) < 10 else 0
        turns = [turn for turn in record.turns if not last or turn.number < last]
        page = turns[-PAGE_SIZE:]
        path = f"/sessions/{shown.id}"
        more = len(turns) > len(page)
        return replace(
            shown,
            record=record,
            verdict=judge_session(record),
            rows=tuple([await self._row(record, turn) for turn in page]),
            earlier=build_path(path, {"before": str(page[0].number)}) if more else "",
            latest=path if last else "",
        )

    async def _row(self, record: SessionRecord, turn: TurnRecord) -> TurnRow:
        outcome = outcome_of(turn)
        labels = {**SAID, **(LIVE_OUTCOMES if record.is_live else {})}
        waits = tuple(draw_waits(turn, self._gateway.graph))
        has_sound = await self._has_sound(turn)
        is_heard = turn.number in record.heard
        root = f"/v1/fleet/sessions/{record.view.id}/turns/{turn.number}"
        return TurnRow(
            turn=turn,
            outcome=outcome,
            label=labels.get(outcome, outcome),
            waits=waits,
            total_ms=sum(wait.part.ms for wait in waits),
            said=_said(record, turn),
            answer=_answer(record, turn),
            speech=f"{root}/speech" if is_heard else "",
            no_speech=_why_no_speech(record, turn) if not is_heard else "",
            sound=f"/v1/fleet/requests/{turn.request}/audio" if has_sound else "",
            no_sound=_why_no_sound(turn) if turn.spoken and not has_sound else "",
        )

    async def _has_sound(self, turn: TurnRecord) -> bool:
        """Return True if the sound of an answer can be played. Raises: RedisUnreachable."""
        edge, request = self._gateway.edges.audio, turn.request
        if edge is None or not request or not turn.spoken:
            return False
        is_recent = not turn.ended_us or now_us() - turn.ended_us < SOUND_STORED_US
        telemetry = self._gateway.client.telemetry
        if is_recent and await telemetry.has_edge_log(RequestId(request), edge):
            return True
        return await self._gateway.history.has_sound(RequestId(request))


def draw_waits(turn: TurnRecord, graph: Graph) -> list[WaitShare]:
    """Return the parts of the caller's wait, in the order of time."""
    parts = waits_of(turn, graph)
    total, x = sum(part.ms for part in parts) or 1.0, 0.0
    drawn: list[WaitShare] = []
    for part in parts:
        width = SCALE * part.ms / total
        drawn.append(WaitShare(part=part, x=round(x, 1), width=round(width, 1)))
        x += width
    return drawn


def _said(record: SessionRecord, turn: TurnRecord) -> str:
    if turn.said:
        return turn.said
    if not turn.items:
        return "The rest of the answer before." if turn.continues else "Nothing new."
    if not record.has_texts:
        return "Not kept: the client asked that nothing be stored."
    if turn.said is None and turn.has_speech:
        return (
            "Not written down: the client did not ask for transcripts "
            "(session.audio.input.transcription), or they have not arrived."
        )
    return "No words were recognised." if turn.has_speech else "No text."


def _answer(record: SessionRecord, turn: TurnRecord) -> str:
    if turn.answer or not record.has_texts:
        return turn.answer
    return "" if not turn.response else "No text."


def _why_no_speech(record: SessionRecord, turn: TurnRecord) -> str:
    if not turn.has_speech or not turn.items:
        return ""
    if record.is_live:
        return "The caller's sound is no longer stored: only the latest of a session is."
    return "The caller's sound is deleted when a session ends."


def _why_no_sound(turn: TurnRecord) -> str:
    if not turn.answer and not turn.outcome:
        return ""
    return (
        "The answer's sound is deleted a minute after its end; history.sound keeps that of answers "
        "that are kept."
    )
