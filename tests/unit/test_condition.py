"""The sentence about the fleet's condition: one rule per test, and nothing asserted as absent for a
time of which nothing is known.
"""

from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from fleet.core.ids import RequestId, RoleName, WorkerId
from fleet.telemetry.condition import QUIET_S, Evidence, FleetCondition, judge
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import SERIES_KEPT_S, SERIES_STEP_S, RoleView, SeriesPoint, WorkerView

SECOND = 1_000_000
NOW = int(datetime(2026, 11, 30, 18, 20, tzinfo=UTC).timestamp()) * SECOND
TALKER = RoleName("talker")
WORKER = WorkerId("talker@host:1:a")


def points(hour: float = 1.0, **last: object) -> list[SeriesPoint]:
    """Return a series whose counts begin `hour` hours ago; two answers end in each step. `last`:
    fields of the last point.
    """
    num_steps, known = SERIES_KEPT_S // SERIES_STEP_S, round(hour * SERIES_KEPT_S // SERIES_STEP_S)
    steps = [
        SeriesPoint(at_us=NOW - (num_steps - n) * SERIES_STEP_S * SECOND) for n in range(num_steps)
    ]
    first = num_steps - known
    counted = [
        SeriesPoint(at_us=point.at_us, running={"talker": 1}, ended={"finished": 2})
        for point in steps[first:]
    ]
    if last:
        counted[-1] = msgspec.structs.replace(counted[-1], **{"ended": {}, **last})
    return [*steps[:first], *counted]


def entry(what: str, ago_s: float, **fields: object) -> JournalEntry:
    at_us = NOW - round(ago_s * SECOND)
    known = {"worker": WORKER, "role": "talker"} if what in ("died", "left", "ordered") else {}
    plain = JournalEntry(id=f"{at_us}-0", at_us=at_us, what=what)
    return msgspec.structs.replace(plain, **{**known, **fields})


def worker(state: str) -> WorkerView:
    return WorkerView(id=WORKER, role="talker", host="host", pid=1, state=state, started_us=1)


CALM = Evidence(
    now_us=NOW,
    roles=(RoleView(role=TALKER, admits=True),),
    workers=(worker("ready"),),
    wanted={TALKER: 1},
    num_live=3,
    max_live=64,
    max_waiting=10,
    points=points(),
)


def said(condition: FleetCondition) -> str:
    """Return the sentence with times as UTC times of day."""
    return "; ".join(
        part.text
        + (f" {datetime.fromtimestamp(part.at_us / 1e6, UTC):%H:%M:%S}" if part.at_us else "")
        for part in condition.parts
    )


def test_calm_fleet_is_well_and_says_how_much_it_did() -> None:
    found = judge(CALM)
    assert found.level == "ok" and found.since_us == 0
    assert said(found) == "3 answers now; 1\u202f440 in the last hour; none refused"


def test_redis_trouble_comes_before_everything_else() -> None:
    found = judge(replace(CALM, redis_trouble="Redis refuses writes (OOM)", missing=[TALKER]))
    assert found.level == "down" and said(found) == "Redis refuses writes (OOM)"


def test_missing_role_is_down_since_its_last_worker_was_lost() -> None:
    roles = (RoleView(role=TALKER),)
    seen = replace(CALM, roles=roles, missing=[TALKER], entries=[entry("died", 7200)])
    found = judge(seen)
    assert found.level == "down" and found.since_us == NOW - 7200 * SECOND
    assert said(found) == "no worker of talker accepts tasks; requests that need it are refused"


def test_drained_last_worker_is_down_and_named() -> None:
    seen = replace(
        CALM,
        roles=(RoleView(role=TALKER),),
        workers=[worker("draining")],
        missing=[TALKER],
        entries=[entry("ordered", 60, detail="drain")],
    )
    found = judge(seen)
    assert found.level == "down" and found.since_us == NOW - 60 * SECOND
    assert "no worker of talker accepts tasks (1 draining)" in said(found)


@pytest.mark.parametrize(
    ("role", "note"),
    [
        (RoleView(role=TALKER, starting=1, loaded_percent=40), " (1 starting, 40 % loaded)"),
        (RoleView(role=TALKER, admits=True), ""),
    ],
)
def test_missing_role_that_still_admits_is_degraded(role: RoleView, note: str) -> None:
    found = judge(replace(CALM, roles=(role,), missing=[TALKER]))
    assert found.level == "degraded"
    assert said(found) == f"talker has no worker now{note}; requests wait for one"


def test_fleet_without_a_free_place_is_degraded() -> None:
    full = replace(CALM, num_live=64, num_waiting=10)
    found = judge(full)
    assert found.level == "degraded"
    assert said(found).startswith("no place is free: 64 requests are live and 10 wait here;")
    assert judge(replace(full, num_waiting=9)).level == "ok", "others may still wait"
    assert judge(replace(full, num_live=63)).level == "ok"


def test_role_below_its_configured_workers_is_degraded() -> None:
    seen = replace(CALM, wanted={TALKER: 2}, workers=[worker("ready"), worker("draining")])
    found = judge(seen)
    assert found.level == "degraded"
    assert said(found) == "talker has 1 of 2 workers (1 draining)"


def test_deaths_are_counted_by_role_and_lead_to_the_newest() -> None:
    deaths = [
        entry("died", 367 - 60 * n, worker=WorkerId(f"talker@host:{n}:a"), detail="SIGKILL")
        for n in range(4)
    ]
    found = judge(replace(CALM, entries=deaths))
    assert found.level == "degraded" and found.since_us == NOW - 367 * SECOND
    assert said(found) == "talker died 4 times, the last time (SIGKILL) at 18:16:53"
    assert found.parts[0].worker == "talker@host:3:a"


def test_process_that_lapsed_and_was_seen_dead_died_once() -> None:
    found = judge(
        replace(CALM, entries=[entry("lapsed", 9, worker=WORKER, role="talker"), entry("died", 8)])
    )
    assert said(found) == "talker died at 18:19:52"


def test_paused_answers_are_told_with_the_longest_pause_and_none_lost() -> None:
    entries = [
        entry("died", 60),
        entry("lost", 60, request="r1"),
        entry("lost", 60, request="r2"),
        entry("recovered", 59, request="r1", pause_us=900_000),
        entry("recovered", 58, request="r2", pause_us=2_100_000),
    ]
    found = judge(replace(CALM, entries=entries))
    assert said(found).endswith("; 2 answers paused, longest 2.1 s; none lost")
    assert found.parts[1].request == RequestId("r2")


def test_lost_answers_are_counted_apart_from_other_failures() -> None:
    entries = [
        entry("lost", 60, request="r1"),
        entry("lost", 60, request="r2"),
        entry("failed", 50, request="r1", code="worker_lost"),
        entry("failed", 40, request="r3", code="engine_error"),
    ]
    found = judge(replace(CALM, entries=entries, points=points(ended={"failed": 3})))
    assert said(found) == "1 lost; 1 answer not continued; 2 failed"
    assert [part.request for part in found.parts] == ["r1", "r2", "r3"]


def test_refusals_are_counted_once_from_series_and_journal() -> None:
    seen = replace(
        CALM,
        points=points(refused={"overloaded": 5}),
        entries=[
            entry("refused", 3, code="overloaded", count=5),
            entry("refused", 2, code="rate_limit_exceeded", count=2),
        ],
    )
    found = judge(seen)
    assert found.level == "degraded"
    assert said(found) == "7 refused (overloaded, rate_limit_exceeded)"


def test_fleet_is_well_again_after_a_quiet_time() -> None:
    old = judge(replace(CALM, entries=[entry("died", QUIET_S + 1)]))
    assert old.level == "ok"
    assert said(old).endswith("none refused; talker died at 18:09:59"), "it is still told"
    assert judge(replace(CALM, entries=[entry("died", QUIET_S)])).level == "degraded"


def test_trouble_began_with_the_first_event_of_an_unbroken_series() -> None:
    entries = [entry("died", ago) for ago in (3000, 1500, 1000, 500)]
    assert judge(replace(CALM, entries=entries)).since_us == NOW - 1500 * SECOND


def test_orders_and_starts_are_no_trouble() -> None:
    entries = [entry("ordered", 9), entry("left", 8), entry("joined", 7), entry("led", 6)]
    assert judge(replace(CALM, entries=entries)).level == "ok"


def test_counts_of_a_part_of_the_hour_say_since_when() -> None:
    found = judge(replace(CALM, points=points(hour=0.25)))
    assert said(found) == (
        "3 answers now; 360 ended; none refused; answers are counted since 18:05:00"
    )
    assert "in the last hour" not in said(found)


def test_journal_of_a_part_of_the_hour_says_since_when() -> None:
    entries = [entry("died", 1200)]
    found = judge(replace(CALM, entries=entries, journal_from_us=entries[0].at_us))
    assert said(found).endswith("; talker died at 18:00:00; events are known since 18:00:00")


def test_fleet_that_recorded_nothing_asserts_no_absence() -> None:
    found = judge(replace(CALM, points=[], journal_from_us=NOW, num_live=0))
    assert said(found) == (
        "0 answers now; answers are counted from now on; events are known from now on"
    )
