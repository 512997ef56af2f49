"""How a turn of a voice session went, and what the caller waited for, in words of the field. Pure;
knows no stage by name.
"""

from typing import Literal

from fleet.graphs import Graph
from web.http.errors import REFUSALS
from web.realtime.protocol.server_events import TimingPart
from web.realtime.response_stream import CANCELLED, FAILED, INCOMPLETE
from web.realtime.turn_log import TurnRecord

TurnOutcome = Literal[
    "answered", "interrupted", "stopped", "refused", "failed", "cut", "open", "unanswered"
]
"""`interrupted`: the user spoke during the response; `stopped`: the client cancelled it; `refused`:
the request was not admitted; `cut`: the response reached its token limit; `open`: no end is
recorded; `unanswered`: no response was requested.
"""
RECOGNISE, MODEL, VOICE, DELIVERY = "recognise", "model", "voice", "delivery"
CAUSES = {"endpointing": "waiting for you to finish", "queue": "queue", "gateway": DELIVERY}


def outcome_of(turn: TurnRecord) -> TurnOutcome:
    if not turn.response:
        return "unanswered"
    if turn.outcome == CANCELLED:
        return "interrupted" if turn.cause == "turn_detected" else "stopped"
    if turn.outcome == FAILED:
        return "refused" if turn.cause in REFUSALS and not turn.answer else "failed"
    if turn.outcome == INCOMPLETE:
        return "cut"
    return "answered" if turn.outcome else "open"


def waits_of(turn: TurnRecord, graph: Graph) -> list[TimingPart]:
    """Return the caller's wait by cause, in the order of time, without causes that took no time.
    The sum is the sum of `turn.parts`.
    """
    causes = {**CAUSES, "silence": "silence before the voice"}
    names = [stage.name for stage in graph.all_stages]
    main = names.index(graph.main_stage.name)
    for place, name in enumerate(names):
        causes[name] = RECOGNISE if place < main else MODEL if place == main else VOICE
    waits: dict[str, float] = {}
    for part in turn.parts:
        cause = causes.get(part.name, part.name)
        waits[cause] = waits.get(cause, 0.0) + part.ms
    return [TimingPart(name=name, ms=round(ms, 1)) for name, ms in waits.items() if ms > 0]
