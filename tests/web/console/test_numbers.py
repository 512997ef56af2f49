"""Number formats, charts and lanes: numbers have units, and drawings stay inside their bounds."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, StageName, Walk
from fleet.graphs import get_graph
from fleet.telemetry.trace import EdgeTrace, RequestTrace, TaskTrace, TraceEvent
from tests.web.plausible import busy
from web.console import formats
from web.console.answer_facts import AnswerFacts
from web.console.answer_view import build_waterfall
from web.console.charts import HEIGHT, WIDTH, draw_path, find_top
from web.console.lanes import SCALE, Lane

VALUES = st.lists(st.none() | st.just(0.0) | st.floats(1e-6, 1e9), max_size=200)
EVENT_NAMES = ("granted", "claimed", "output", "lost", "handed_off", "finished", "failed", "odd")
STAGES = (StageName("thinker"), StageName("talker"))


@pytest.mark.parametrize(
    ("form", "values"),
    [
        (formats.ms, {0.04: "0.0 ms", 9.94: "9.9 ms", 84.4: "84 ms", 12_345: "12 s", None: "–"}),
        (formats.us, {0: "0 µs", 999: "999 µs", 1_000: "1.0 ms", 45_600: "46 ms", None: "–"}),
        (
            formats.seconds,
            {
                0.05: "50 ms",
                3.04: "3.0 s",
                61: "61 s",
                125: "2 min 05 s",
                3_660: "1 h 01 min",
                90_000: "1 d 1 h",
            },
        ),
        (formats.size, {999: "999 B", 1_250_000: "1.2 MB", 3.1e6: "3.1 MB"}),
        (formats.count, {48_000: "48\u202f000", 44.1: "44.1"}),
        (formats.rate, {4.24: "4.2 /s"}),
        (formats.clock, {0: "–"}),
        (formats.stamp, {1_500_000: "1970-01-01 00:00:01.500 UTC"}),
    ],
)
def test_numbers_have_units(form: Callable[[Any], str], values: dict[float | None, str]) -> None:
    assert {value: form(value) for value in values} == values


@given(VALUES)
def test_chart_line_stays_inside_the_chart(measured: list[float | None]) -> None:
    top = find_top(measured)
    assert all(value is None or value <= top * (1 + 1e-9) for value in measured)
    points = re.findall(r"[ML]([\d.-]+) ([\d.-]+)", draw_path(measured, top))
    assert len(points) == sum(value is not None for value in measured)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in points)
    runs = sum(
        value is not None and (n == 0 or measured[n - 1] is None)
        for n, value in enumerate(measured)
    )
    assert draw_path(measured, top).count("M") == runs, "gaps are not bridged"


@given(st.floats(1e-3, 1e9))
def test_chart_top_is_round_and_near(highest: float) -> None:
    assert highest <= find_top([highest]) * (1 + 1e-9) and find_top([highest]) <= highest * 2.01


EVENTS = st.lists(
    st.builds(
        TraceEvent,
        at_us=st.integers(0, 2_000_000),
        what=st.sampled_from(EVENT_NAMES),
        stage=st.sampled_from(["", *STAGES]),
        worker=st.sampled_from(["", "w1", "w2"]),
    ),
    max_size=30,
)


@given(
    EVENTS,
    st.integers(1, 1_500_000),
    st.integers(0, 3_000_000),
    st.lists(st.integers(0, 10**7), max_size=900),
)
def test_lanes_stay_on_the_axis_for_any_clock(
    events: list[TraceEvent], created_us: int, length_us: int, ticks: list[int]
) -> None:
    trace = build_trace(tuple(events), created_us, created_us + length_us)
    walks = ("prefill", "decode")
    chunks = [
        Chunk(
            request=trace.id,
            edge=EdgeName("text"),
            index=n,
            epoch=Epoch(1),
            produced_us=at,
            producer_walk=Walk(walks[at % 2]),
        )
        for n, at in enumerate(ticks)
    ]
    drawn = build_waterfall(AnswerFacts(trace, get_graph("qwen3_omni"), 24_000), {"text": chunks})
    lanes = [lane.key for lane in drawn.lanes if lane.kind != "walk"]
    assert lanes == ["you", "request", "stage-thinker", "hop-text", "stage-talker"]
    assert (
        all(0 <= x <= SCALE for x, _ in drawn.labels)
        and drawn.labels[0] == (0.0, "0")
        and len(drawn.labels) >= 3
    )
    for lane in drawn.lanes:
        assert all(
            0 <= span.x and span.x + span.width <= SCALE + 0.2 and span.width > 0
            for span in lane.spans
        )
        assert all(0 <= point.x <= SCALE for point in lane.points) and len(lane.points) <= 400
        assert all(span.detail for span in lane.spans)


def build_trace(events: tuple[TraceEvent, ...], created_us: int, now_us: int) -> RequestTrace:
    tasks = tuple(
        TaskTrace(
            stage=stage, state="running", role=stage, owner="w1", walk="decode", epoch=Epoch(1)
        )
        for stage in STAGES
    )
    edge = EdgeTrace(
        name=EdgeName("text"),
        source=STAGES[0],
        target=StageName("client"),
        produced=3,
        consumed=2,
        items=9,
        first_us=created_us + 5,
        last_us=created_us + 9,
    )
    times = {"created_us": created_us, "ended_us": 0, "now_us": now_us}
    return msgspec.structs.replace(
        finished_trace(), state="running", tasks=tasks, edges=(edge,), kv=(), events=events, **times
    )


@cache
def finished_trace() -> RequestTrace:
    return next(
        trace
        for trace in busy(get_graph("qwen3_omni")).traces.values()
        if trace.state == "finished"
    )


def test_waterfall_shows_both_owners_after_a_recovery() -> None:
    graph = get_graph("qwen3_omni")
    facts = AnswerFacts(finished_trace(), graph, 24_000)
    lanes = {lane.key: lane for lane in build_waterfall(facts, {}).lanes}
    stage = lanes[f"stage-{graph.stages[0].name}"]
    assert [span.kind for span in stage.spans] == ["wait", "first", "output", "wait", "output"]
    assert [point.kind for point in stage.points] == ["lost"]
    assert lanes[f"kv-{graph.stages[0].name}"].note == "2 owners"
    assert "GB/s" in volume(lanes) and lanes["request"].stage == ""


def volume(lanes: dict[str, Lane]) -> str:
    return " ".join(lane.note for lane in lanes.values() if lane.kind == "hop")
