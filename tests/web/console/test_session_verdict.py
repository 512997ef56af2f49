"""The sentence on a session, and the wait by cause: both follow from the recorded turns."""

from typing import Any

import msgspec
import pytest

from fleet.core.clock import now_us
from fleet.graphs import get_graph
from tests.web.console.busy_gateway import session
from tests.web.plausible_sessions import OTHER, build_turns, parts_of
from web.console.session_verdict import judge_session
from web.realtime.recorded_sessions import SessionRecord
from web.realtime.session_keeper import troubles_of
from web.realtime.turn_log import TurnRecord
from web.realtime.turn_outcomes import outcome_of, waits_of

GRAPH = get_graph("qwen3_omni")
BEGUN = now_us() - 300_000_000


def record_of(*turns: TurnRecord, is_live: bool = False, ended: bool = True) -> SessionRecord:
    view = msgspec.structs.replace(
        session(1, "listening", "req-1"), created_us=BEGUN, seen_us=BEGUN + 190_000_000
    )
    ended_us = BEGUN + 190_000_000 if ended and not is_live else 0
    return SessionRecord(view=view, turns=turns, is_live=is_live, ended_us=ended_us)


def turn(number: int = 1, **fields: object) -> TurnRecord:
    given: dict[str, object] = {
        "number": number,
        "response": f"resp_{number}",
        "outcome": "completed",
        "voice_to_voice_ms": 600.0 + number,
        **fields,
    }
    return msgspec.convert(given, TurnRecord)


def text_of(record: SessionRecord) -> str:
    return judge_session(record).text


def test_session_whose_answers_came_in_time_is_fine() -> None:
    assert text_of(record_of(turn(1), turn(2), turn(3))) == (
        "Fine: 3 turns in 3 min 10 s, all answered, usual wait 602 ms from the end of the caller's "
        "speech to the first sound."
    )


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({"outcome": "failed", "cause": "worker_lost"}, "With failures"),
        ({"outcome": "failed", "cause": "overloaded"}, "With failures"),
        ({"underruns": 1}, "With dropouts"),
        ({"voice_to_voice_ms": 1700.0}, "Slow"),
        ({"outcome": ""}, "Ended before the last answer"),
        ({"response": ""}, "Ended before the last answer"),
    ],
)
def test_session_with_trouble_is_not_called_fine(fields: dict[str, Any], title: str) -> None:
    assert text_of(record_of(turn(1, **fields))).startswith(f"{title}: 1 turn in ")


def test_every_outcome_is_counted_once() -> None:
    turns = build_turns(GRAPH, "req-1")
    text = text_of(record_of(*turns))
    for said in (
        "8 turns",
        "3 answered",
        "1 interrupted by the caller",
        "1 cut at the limit of tokens",
        "1 refused (overloaded)",
        "1 failed (worker_lost)",
        "1 without a recorded end",
        "1 continued after a false alarm",
        "1 resumed at another gateway",
        "2 dropouts",
    ):
        assert said in text, said
    assert "1 under way" in text_of(record_of(*turns, is_live=True))
    assert troubles_of(turns) == ("failed", "refused", "moved", "dropouts")
    assert [outcome_of(one) for one in turns][4:6] == ["refused", "failed"]


def test_end_that_was_not_recorded_is_not_claimed() -> None:
    text = text_of(record_of(turn(1), ended=False))
    assert text.startswith("End not recorded: 1 turn in") and "not known here" in text
    assert "Fine" not in text


def test_turns_that_are_no_longer_recorded_are_told() -> None:
    text = text_of(record_of(turn(11), turn(12)))
    assert "12 turns" in text and "of which the first 10 are no longer recorded" in text


@pytest.mark.parametrize("name", ["qwen3_omni", "cascade"])
def test_parts_of_the_wait_by_cause_add_up(name: str) -> None:
    graph = get_graph(name)
    spoken = turn(parts=[{"name": part.name, "ms": part.ms} for part in parts_of(graph)])
    waits = {wait.name: wait.ms for wait in waits_of(spoken, graph)}
    assert sum(waits.values()) == pytest.approx(sum(part.ms for part in spoken.parts))
    assert list(waits)[:2] == ["waiting for you to finish", "queue"]
    assert {"model", "voice", "delivery"} <= waits.keys()
    assert ("recognise" in waits) == (name == "cascade")


def test_moved_turn_names_its_gateways() -> None:
    assert "1 resumed at another gateway" in text_of(record_of(turn(gateways=["a", OTHER])))
