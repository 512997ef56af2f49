"""The last hour on one axis: positions stay on it, marks lead to what explains them, and a process
is drawn for the time that it lived.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.ids import RequestId, WorkerId
from fleet.telemetry.journal import WHAT, JournalEntry
from fleet.telemetry.views import SeriesPoint, WorkerView
from web.console.hour import (
    MAX_LANES,
    MAX_TRACKS,
    MERGED,
    STEP_US,
    HourWindow,
    LifeRow,
    describe,
    life_rows,
    link_of,
    mark_rows,
)
from web.console.hour_charts import RECENT_STEPS, HourCharts

NOW = 1_800_000_000_000_000
WINDOW = HourWindow.until(NOW)
MINUTE = 60_000_000


def entry(
    what: str, ago_us: int = 0, worker: str = "talker@h:1:a", **fields: object
) -> JournalEntry:
    at_us = NOW - ago_us
    return msgspec.convert(
        {"id": f"{at_us // 1000}-{ago_us}", "at_us": at_us, "what": what, "worker": worker}
        | {"role": "talker"}
        | fields,
        JournalEntry,
    )


def view(worker: str, state: str, started_us: int, ended_us: int = 0) -> WorkerView:
    return WorkerView(
        id=WorkerId(worker),
        role="talker",
        host="h",
        pid=1,
        state=state,
        started_us=started_us,
        ended_us=ended_us,
    )


ENTRIES = st.lists(
    st.builds(
        entry,
        st.sampled_from(WHAT),
        st.integers(-MINUTE, 90 * MINUTE),
        st.sampled_from(["a@h:1:1", "b@h:1:2", "c@h:1:3", ""]),
        role=st.sampled_from(["", "talker", "thinker"]),
        count=st.integers(0, 9),
    ),
    max_size=60,
).map(lambda found: sorted(found, key=lambda one: one.at_us))


@given(ENTRIES)
def test_marks_and_lives_stay_on_the_axis(entries: list[JournalEntry]) -> None:
    for row in mark_rows(entries, WINDOW):
        assert all(0 <= mark.x <= 100 and mark.text and mark.href for mark in row.marks)
        assert sum(mark.count for mark in row.marks) == row.count
        places = [mark.x for mark in row.marks]
        assert places == sorted(places) and len({mark.key for mark in row.marks}) == len(places)
    rows = life_rows([], entries, WINDOW)
    assert len(rows) <= MAX_LANES
    for row in rows:
        assert all(0 <= life.x <= 100 and life.width > 0 for life in row.lives)
        assert all(one.end <= other.x for one, other in zip(row.lives, row.lives[1:], strict=False))


def test_entries_at_nearly_one_time_are_one_mark() -> None:
    near = [entry("died", 10 * MINUTE - n * 1_000_000) for n in range(4)]
    (row,) = mark_rows([*near, entry("died", MINUTE)], WINDOW)
    assert [mark.count for mark in row.marks] == [4, 1] and row.count == 5
    assert row.marks[0].text.startswith("4 from ")
    assert MERGED * 3600 / 100 > 3


@pytest.mark.parametrize(
    ("found", "href"),
    [
        (entry("died"), "/workers/talker@h:1:a"),
        (entry("ordered", detail="drain"), "/workers/talker@h:1:a"),
        (entry("failed", request=RequestId("req-1")), "/requests/req-1"),
        (entry("refused", role="", code="overloaded"), f"/logs?before={NOW // 1000 + 30_000}-0"),
        (entry("led", role=""), f"/logs?process=conductor&before={NOW // 1000 + 30_000}-0"),
        (entry("died", worker="", role=""), f"/logs?before={NOW // 1000 + 30_000}-0"),
    ],
)
def test_mark_leads_to_what_explains_it(found: JournalEntry, href: str) -> None:
    assert link_of(found) == href


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (entry("died", detail="SIGKILL", count=2), "talker@h:1:a died: SIGKILL, with 2 tasks"),
        (entry("ordered", detail="drain", by="me"), "talker@h:1:a was set to drain by key me"),
        (entry("refused", code="overloaded", count=5), "5 requests refused (overloaded)"),
        (
            entry("failed", worker="", request=RequestId("req-1"), code="worker_lost"),
            "req-1 failed (worker_lost)",
        ),
    ],
)
def test_entry_is_described_in_a_line(found: JournalEntry, said: str) -> None:
    assert describe(found) == said


def lives(*rows: LifeRow) -> list[list[str]]:
    return [[life.worker for life in row.lives] for row in rows]


def test_processes_that_follow_each_other_share_a_row() -> None:
    entries = [
        entry("died", 50 * MINUTE, "a"),
        entry("joined", 49 * MINUTE, "b"),
        entry("died", 30 * MINUTE, "b"),
    ]
    rows = life_rows([view("c", "ready", NOW - 29 * MINUTE)], entries, WINDOW)
    assert lives(*rows) == [["a", "b", "c"]]
    assert [life.died for life in rows[0].lives] == [True, True, False]
    first, second, third = rows[0].lives
    assert first.x == 0 and second.x == pytest.approx(100 * 11 / 60, abs=0.3)
    assert third.end == 100


def test_roles_are_in_the_order_of_their_stages_and_gateways_last() -> None:
    replace = msgspec.structs.replace
    workers = [
        replace(view(role or "gateway", "ready", NOW - MINUTE), role=role)
        for role in ("", "thinker.span", "code2wav", "thinker")
    ]
    rows = life_rows(workers, [], WINDOW, ("thinker", "talker", "code2wav"))
    assert [row.label for row in rows] == ["thinker", "thinker.span", "code2wav", "gateway"]


def test_processes_that_live_together_have_a_row_each_up_to_a_limit() -> None:
    workers = [view(f"w{n}", "ready", NOW - 30 * MINUTE) for n in range(MAX_TRACKS + 3)]
    rows = life_rows(workers, [], WINDOW)
    assert len(rows) == MAX_TRACKS and rows[0].label == "talker" and rows[1].label == ""
    assert [row.num_more for row in rows] == [0] * (MAX_TRACKS - 1) + [3]


def test_process_that_ended_before_the_hour_is_not_drawn() -> None:
    assert life_rows([view("a", "died", NOW - 10**12, NOW - 90 * MINUTE)], [], WINDOW) == ()


def test_listed_process_is_drawn_once_beside_its_entries() -> None:
    entries = [entry("joined", 20 * MINUTE, "a"), entry("died", 10 * MINUTE, "a")]
    listed = view("a", "died", NOW - 20 * MINUTE, NOW - 10 * MINUTE)
    assert lives(*life_rows([listed], entries, WINDOW)) == [["a"]]


def series() -> list[SeriesPoint]:
    return [
        SeriesPoint(at_us=NOW - 20_000_000),
        SeriesPoint(
            at_us=NOW - 15_000_000,
            running={"thinker.prefill": 1, "thinker.decode": 2, "talker": 4},
            ended={"finished": 1},
            first_audio_p50_ms=212.34,
            first_audio_p95_ms=400,
        ),
    ]


def test_step_that_nobody_wrote_has_no_numbers() -> None:
    charts = HourCharts(series=series(), stages=("thinker", "talker"), speaks=True)
    whole = charts.whole()
    assert whole.at_s == NOW // 1_000_000 - 20
    assert {values[0] for values in whole.columns.values()} == {None}
    assert {name: values[1] for name, values in whole.columns.items()} == {
        "finished": 0.2,
        "failed": 0,
        "aborted": 0,
        "p50": 212.0,
        "p95": 400,
        "running:thinker": 3,
        "running:talker": 4,
        "waiting": 0,
        "underruns": 0,
        "rtf": None,
    }


def test_charts_name_their_numbers_and_columns() -> None:
    drawn = HourCharts(series=series(), stages=("thinker", "talker"), speaks=True)
    charts = drawn.charts()
    assert [chart.key for chart in charts] == ["ended", "first", "tasks", "listening"]
    assert {line.column for chart in charts for line in chart.lines} == set(drawn.whole().columns)
    first = charts[1]
    assert first.now == "p50 212 ms, p95 400 ms" and "p95 400 ms" in first.description
    assert "7 running, 0 waiting" in charts[2].description


def test_equal_percentiles_are_one_number() -> None:
    equal = [msgspec.structs.replace(series()[1], first_audio_p95_ms=212.34)]
    assert HourCharts(series=equal, stages=(), speaks=True).charts()[1].now == "212 ms"
    text = HourCharts(series=equal, stages=(), speaks=False).charts()[1]
    assert text.title == "First text" and text.now == "–"


def test_recent_numbers_are_the_end_of_the_whole_ones() -> None:
    points = [SeriesPoint(at_us=NOW + n * 5_000_000, submitted=1) for n in range(40)]
    drawn = HourCharts(series=points, stages=(), speaks=True)
    whole, recent = drawn.whole(), drawn.recent()
    assert recent.at_s == whole.at_s + 5 * (40 - RECENT_STEPS)
    assert recent.columns == {
        name: values[-RECENT_STEPS:] for name, values in whole.columns.items()
    }


def test_charts_of_an_empty_series_say_nothing_was_measured() -> None:
    drawn = HourCharts(series=[], stages=("thinker",), speaks=True)
    assert [chart.now for chart in drawn.charts()][:3] == ["–", "–", "–"]
    assert drawn.whole().at_s == 0


def test_window_of_a_past_time_has_it_in_whole_steps_with_few_ticks() -> None:
    window = HourWindow.of(NOW - 7 * MINUTE, NOW)
    assert window.from_us <= NOW - 7 * MINUTE < window.from_us + STEP_US
    assert window.to_us - STEP_US <= NOW < window.to_us
    for length in (MINUTE, 20 * MINUTE, 600 * MINUTE, 20_000 * MINUTE):
        ticks = HourWindow.of(NOW - length, NOW).ticks
        assert 0 < len(ticks) <= 8 and all(0 <= x <= 100 for x, _ in ticks)


def test_process_that_began_after_a_past_time_is_not_drawn() -> None:
    window = HourWindow.of(NOW - 30 * MINUTE, NOW - 20 * MINUTE)
    late = view("talker@h:9:z", "ready", NOW - 10 * MINUTE)
    assert life_rows([late], [], window) == ()


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("cancel", "req-1 was cancelled by key night"),
        ("retry", "req-1 was sent as a retry by key night"),
        ("redeliver", "req-1 was taken from its worker by key night"),
    ],
)
def test_order_on_an_answer_is_told_and_leads_to_it(order: str, text: str) -> None:
    ordered = entry("ordered", worker="", request="req-1", by="night", detail=order)
    assert describe(ordered) == text and link_of(ordered) == "/requests/req-1"


def test_charts_of_a_past_time_call_nothing_present() -> None:
    charts = HourCharts(series=series(), stages=("thinker",), speaks=True, is_past=True).charts()
    texts = " ".join(f"{chart.now} {chart.description}" for chart in charts)
    assert "last minute" not in texts and "the hour" not in texts
    assert "running," not in charts[2].now
    assert not any(chart.at_us for chart in charts)
