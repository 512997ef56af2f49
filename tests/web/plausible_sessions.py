"""Voice sessions with turns of every outcome, live and kept, for pages to show."""

from pathlib import Path

import msgspec

from fleet.core.clock import now_us
from fleet.core.ids import RequestId
from fleet.graphs import Graph
from fleet.history.file import HistoryFile
from fleet.history.sessions import KeptSession, KeptSessionStore
from tests.web.plausible_requests import HOSTILE
from web.realtime.protocol.server_events import TimingPart
from web.realtime.recorded_sessions import SessionRecord
from web.realtime.session_keeper import troubles_of
from web.realtime.session_views import SessionView
from web.realtime.turn_log import TurnRecord, encode_turn

MIB = 1 << 20
GATEWAY, OTHER = "gateway@machine:4120:000014", "gateway@machine:4188:00001c"

ANSWER = "On Tuesday the shop opens at nine, and it closes at half past six."
KINDS: list[dict[str, object]] = [
    {"said": "When does the shop open on Tuesday?", "answer": ANSWER, "outcome": "completed"},
    {
        "said": f"And on Wednesday? {HOSTILE}",
        "answer": ANSWER,
        "played": "On Tuesday the shop",
        "outcome": "cancelled",
        "cause": "turn_detected",
    },
    {"answer": "opens at nine.", "outcome": "completed", "continues": True},
    {
        "said": "Book a table for two.",
        "answer": "One moment.",
        "outcome": "completed",
        "tools": ["book_table", "send_message"],
        "underruns": 2,
    },
    {
        "said": None,
        "outcome": "failed",
        "cause": "overloaded",
        "message": "all 8 places are taken; try again shortly",
    },
    {
        "said": "Are you still there?",
        "answer": "Yes, I",
        "outcome": "failed",
        "cause": "worker_lost",
        "message": "the worker of talker was lost, and its task could not be continued",
    },
    {
        "said": "Tell me a story. " * 80,
        "answer": "Once upon a time. " * 200,
        "outcome": "incomplete",
        "cause": "max_output_tokens",
        "gateways": [GATEWAY, OTHER],
    },
    {"said": "Thank you.", "answer": "You are"},
]
"""What differs between the turns of a session, one of every outcome."""


def parts_of(graph: Graph) -> list[TimingPart]:
    stages = [(stage.name, 60.0 + 40 * number) for number, stage in enumerate(graph.all_stages)]
    waits = [("endpointing", 210.0), ("queue", 14.0), *stages, ("gateway", 6.0), ("silence", 31.0)]
    return [TimingPart(name=name, ms=ms) for name, ms in waits]


def build_turns(graph: Graph, request: str) -> list[TurnRecord]:
    """Build the turns of one session, which has one of every outcome."""
    begun = now_us() - 80_000_000
    parts = parts_of(graph)
    common = {"spoken": True, "has_speech": True, "gateways": [GATEWAY]}
    turns: list[TurnRecord] = []
    for number, fields in enumerate(KINDS, 1):
        ended_us = begun + number * 9_000_000 + 4_000_000 if "outcome" in fields else 0
        given: dict[str, object] = {
            "number": number,
            "request": RequestId(request),
            "response": f"resp_{number}",
            "items": [] if fields.get("continues") else [f"item_{number}"],
            "began_us": begun + number * 9_000_000,
            "ended_us": ended_us,
            "voice_to_voice_ms": 655.0 if fields.get("answer") else None,
            "parts": parts if fields.get("answer") else [],
            **common,
            **fields,
        }
        turns.append(msgspec.convert(given, TurnRecord))
    return turns


def fields_of(view: SessionView, turns: list[TurnRecord]) -> dict[str, bytes]:
    """Return the fields of a live session's record, with the sound of its first turn."""
    written = {f"turn:{turn.number:06}": encode_turn(turn) for turn in turns}
    return {"view": msgspec.json.encode(view), "clip:item_1.0": bytes(32_000), **written}


def keep_sessions(folder: Path, graph: Graph, request: str, view: SessionView) -> list[str]:
    """Keep three sessions in a history's folder: one with troubles, one without, and one whose
    gateway was killed. Return their ids.
    """
    store = KeptSessionStore(HistoryFile(folder, 16 * MIB, 14))
    turns = build_turns(graph, request)
    kept: list[str] = []
    for number, shown in enumerate((turns, turns[:1], turns[:2])):
        begun = now_us() - (number + 1) * 3_600_000_000
        named = msgspec.structs.replace(
            view, id=f"sess_{number + 7:032x}", created_us=begun, seen_us=begun + 95_000_000
        )
        ended_us = 0 if number == 2 else named.seen_us + 100_000
        record = SessionRecord(
            view=named,
            turns=tuple(shown),
            ended_us=ended_us,
            end="the session is over" if ended_us else "",
        )
        store.keep(
            KeptSession(
                session=named.id,
                began_us=begun,
                seen_us=named.seen_us,
                ended_us=ended_us,
                num_turns=len(shown),
                key="night-shift" if number == 1 else "",
                why=troubles_of(shown),
                record=msgspec.msgpack.encode(record),
            )
        )
        kept.append(named.id)
    return kept
