"""Time spans of the walks of a request's tasks: in order, without overlap, only while a worker owns
the task.
"""

from itertools import pairwise

import msgspec
import pytest

from fleet.graphs import get_graph
from fleet.telemetry.trace import RequestTrace
from tests.harness import answer, fake_spec, gateway, thread_fleet
from tests.web.console.busy_gateway import build_chunks
from tests.web.plausible import busy
from web.console.answer_facts import AnswerFacts
from web.console.answer_view import build_waterfall
from web.fleet_api.chrome_trace import chrome_trace_of
from web.fleet_api.walk_spans import EdgeLogs, find_walk_spans

GRAPH = get_graph("qwen3_omni")
THINKER, TALKER, CODE2WAV = (stage.name for stage in GRAPH.stages)
ALL_WALKS = ["prefill", "last_prefill", "decode"]


def finished_trace() -> tuple[RequestTrace, EdgeLogs]:
    trace = next(trace for trace in busy(GRAPH).traces.values() if trace.state == "finished")
    return trace, {
        edge.name: build_chunks(trace, edge, GRAPH) for edge in trace.edges if not edge.medium
    }


def test_walk_spans_follow_the_chunk_markers() -> None:
    trace, logs = finished_trace()
    tasks = {task.stage: task for task in trace.tasks}
    spans = find_walk_spans(trace, tasks[TALKER], GRAPH, logs)
    assert [span.walk for span in spans] == ALL_WALKS
    assert all(one.to_us == other.from_us for one, other in pairwise(spans))
    assert find_walk_spans(trace, tasks[CODE2WAV], GRAPH, logs) == (), "a single walk has no span"


def test_walk_spans_exclude_times_without_owner() -> None:
    trace, logs = finished_trace()
    spans = find_walk_spans(
        trace, next(task for task in trace.tasks if task.stage == THINKER), GRAPH, logs
    )
    lost = next(event.at_us for event in trace.events if event.what == "lost")
    claimed = next(
        event.at_us for event in trace.events if event.what == "claimed" and event.at_us > lost
    )
    assert (
        list(dict.fromkeys(span.walk for span in spans)) == ["prefill", "decode"]
        and len({s.worker for s in spans}) == 2
    )
    assert not any(span.from_us < claimed and span.to_us > lost for span in spans)


def test_walk_spans_are_equal_without_walk_in_chunks() -> None:
    trace, logs = finished_trace()
    unmarked = {
        edge: [msgspec.structs.replace(chunk, walk=None) for chunk in produced]
        for edge, produced in logs.items()
    }
    task = next(task for task in trace.tasks if task.stage == TALKER)
    assert find_walk_spans(trace, task, GRAPH, unmarked) == find_walk_spans(
        trace, task, GRAPH, logs
    )


def test_waterfall_and_chrome_trace_name_walks() -> None:
    trace, logs = finished_trace()
    lane = next(
        lane
        for lane in build_waterfall(AnswerFacts(trace, GRAPH, 24_000), logs).lanes
        if lane.key == f"walks-{TALKER}"
    )
    assert [span.kind for span in lane.spans] == ["walk"] * 3
    assert all(
        walk in lane.note and walk in span.detail
        for walk, span in zip(ALL_WALKS, lane.spans, strict=True)
    )
    assert "decode" in {span.label for span in lane.spans}, "a long span has a label"
    named = {
        event.name for event in chrome_trace_of(trace, GRAPH, logs).traceEvents if event.ph == "X"
    }
    assert set(ALL_WALKS) <= named


@pytest.mark.parametrize("source", ["producer", "conductor"])
async def test_real_request_has_walk_spans(redis_url: str, source: str) -> None:
    with thread_fleet(redis_url, f"stages.talker.transition_source={source}") as fleet:
        async with gateway(fleet) as client:
            spec = fake_spec(fleet)
            await answer(client, spec)
            trace = await client.telemetry.trace(spec.id)
            assert trace is not None
            logs = {
                str(edge.name): await client.telemetry.edge_log(spec.id, edge.name)
                for edge in trace.edges
            }
    found = {
        task.stage: [span.walk for span in find_walk_spans(trace, task, GRAPH, logs)]
        for task in trace.tasks
    }
    assert found[THINKER] == ["prefill", "decode"] and found[TALKER][-1] == "decode"
    assert found[TALKER] == [walk for walk in ALL_WALKS if walk in found[TALKER]], (
        "in order, each once"
    )
