"""Incidents in the journal: which troubles are one, when it is over, what it says, and that its id
stays the same.
"""

import msgspec
import pytest

from fleet.core.ids import RequestId, RoleName, WorkerId
from fleet.telemetry.incidents import (
    GAP_US,
    Incident,
    JournalView,
    find_incidents,
    id_of,
    time_of,
)
from fleet.telemetry.journal import JournalEntry

SECOND = 1_000_000
BEGIN = 1_795_000_000 * SECOND
TALKER = RoleName("talker")
WORKER, OTHER = WorkerId("talker@host:1:a"), WorkerId("talker@host:2:b")
REQUEST = RequestId("req-1")


def entry(what: str, at_s: float, **fields: object) -> JournalEntry:
    """Return an entry `at_s` seconds after `BEGIN`, of the worker unless it is about a request."""
    at_us = BEGIN + round(at_s * SECOND)
    process = {"worker": WORKER, "role": TALKER}
    known = {} if what in ("refused", "failed", "led") else process
    plain = JournalEntry(id=f"{at_us // 1000}-0", at_us=at_us, what=what)
    return msgspec.structs.replace(plain, **{**known, **fields})


def incidents(
    *entries: JournalEntry, now_s: float = 10_000, from_us: int = 0, needed: str = TALKER
) -> list[Incident]:
    return find_incidents(
        JournalView(
            entries=entries,
            now_us=BEGIN + round(now_s * SECOND),
            from_us=from_us,
            needed=(RoleName(needed),),
        )
    )


def said(incident: Incident) -> str:
    return "; ".join(part.text for part in incident.parts)


DEATH = entry("died", 0, detail="SIGKILL", serving=1)


def test_quiet_journal_has_no_incident() -> None:
    assert incidents(entry("joined", 0), entry("led", 1), entry("left", 2, serving=1)) == []


def test_troubles_within_ten_minutes_are_one_incident_and_later_ones_another() -> None:
    gap_s = GAP_US / SECOND
    times = (0, gap_s - 1, 3 * gap_s)
    later, first = incidents(*(entry("died", at, serving=1) for at in times))
    assert (first.begin_us, first.end_us) == (BEGIN, BEGIN + round((gap_s - 1) * SECOND))
    assert later.begin_us == later.end_us == BEGIN + round(3 * gap_s * SECOND)


@pytest.mark.parametrize("what", ["died", "lapsed", "failed", "refused", "lost"])
def test_each_trouble_begins_an_incident(what: str) -> None:
    (found,) = incidents(entry(what, 0))
    assert found.level == "degraded"


def test_incident_goes_on_until_it_has_been_quiet() -> None:
    (found,) = incidents(DEATH, now_s=GAP_US / SECOND - 1)
    assert found.end_us is None and found.is_open
    (found,) = incidents(DEATH, now_s=GAP_US / SECOND)
    assert found.end_us == BEGIN


def test_id_is_the_time_of_the_first_trouble_and_stays_while_it_goes_on() -> None:
    (early,) = incidents(DEATH, now_s=1)
    (late,) = incidents(DEATH, entry("failed", 300), now_s=400)
    assert early.id == late.id == id_of(BEGIN)
    at_us = time_of(early.id)
    assert at_us is not None and late.has(at_us)
    assert time_of("yesterday") is None


@pytest.mark.parametrize("order", ["drain", "stop"])
def test_last_worker_ordered_off_is_down_until_one_serves_again(order: str) -> None:
    drained = entry("ordered", 0, detail=order, serving=0, by="night")
    (found,) = incidents(drained, now_s=5_000)
    assert found.level == "down" and found.is_open
    assert said(found).startswith("no worker of talker accepted tasks, and requests that needed it")
    (found,) = incidents(drained, entry("ordered", 700, detail="resume"), now_s=5_000)
    assert found.end_us == BEGIN + 700 * SECOND and "for 11 min 40 s from" in said(found)


def test_worker_ordered_off_beside_others_is_no_incident() -> None:
    assert incidents(entry("ordered", 0, detail="drain", serving=1)) == []


def test_role_that_no_answer_needs_may_have_no_worker() -> None:
    assert incidents(entry("left", 0, serving=0), needed="thinker") == []


def test_lost_last_worker_is_down_only_if_none_comes_in_time() -> None:
    died = entry("died", 0, serving=0)
    (soon,) = incidents(died, entry("joined", 3, worker=OTHER))
    assert soon.level == "degraded" and "requests waited for one" in said(soon)
    (late,) = incidents(died, entry("joined", 60, worker=OTHER))
    assert late.level == "down" and late.outages[0].refuses


def test_standby_worker_that_joins_ends_no_outage() -> None:
    (found,) = incidents(entry("died", 0, serving=0), entry("joined", 5, detail="standby"))
    assert found.is_open and found.level == "down"


def test_sentence_and_facts_of_a_death() -> None:
    task = {"request": REQUEST, "stage": "talker"}
    (found,) = incidents(
        DEATH,
        entry("lost", 0, **task),
        entry("recovered", 1.5, worker=OTHER, pause_us=1_500_000, **task),
        entry("refused", 2, code="overloaded", count=3),
        entry("refused", 7, code="overloaded", count=2),
    )
    assert said(found) == (
        "talker died (SIGKILL) at; 1 answer paused, longest 1.5 s; none lost; "
        "5 refused (overloaded)"
    )
    assert found.roles == (TALKER,) and [one.worker for one in found.deaths] == [WORKER]
    assert found.refused == {"overloaded": 5}
    (answer,) = found.answers
    assert (answer.state, answer.pause_us) == ("continued", 1_500_000)
    assert (answer.lost_with, answer.recovered_by) == (WORKER, OTHER)


def test_answers_say_what_became_of_them() -> None:
    (found,) = incidents(
        entry("lost", 0, request="req-1"),
        entry("recovered", 1, request="req-1"),
        entry("lost", 2, request="req-1"),
        entry("lost", 2, request="req-2"),
        entry("failed", 3, request="req-2", code="worker_lost"),
        entry("failed", 4, request="req-3", code="engine_error"),
    )
    assert {one.request: one.state for one in found.answers} == {
        "req-1": "open",
        "req-2": "lost",
        "req-3": "failed",
    }


def test_journal_that_begins_shortly_before_an_incident_says_so() -> None:
    (found,) = incidents(DEATH, from_us=BEGIN - 60 * SECOND)
    assert found.begins_earlier and "events are known since" in said(found)
    (found,) = incidents(DEATH, from_us=BEGIN - GAP_US)
    assert not found.begins_earlier
