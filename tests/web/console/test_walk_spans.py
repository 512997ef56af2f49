"""The walks of a request's tasks: named in order, never two at once, and only while a worker had the task."""

from itertools import pairwise

import msgspec
import pytest

from fleet.core.request_trace import RequestTrace
from fleet.graphs import get_graph
from tests.harness import answer, fake_spec, gateway, thread_fleet
from tests.web.console.busy_gateway import chunks
from tests.web.plausible import busy
from web.console.page_context import assign_colours
from web.console.waterfall import build_waterfall
from web.fleet_api.chrome_trace import chrome_trace_of
from web.fleet_api.walk_spans import EdgeLogs, find_walk_spans

GRAPH = get_graph("qwen3_omni")
THINKER, TALKER, CODE2WAV = (stage.name for stage in GRAPH.stages)
ALL_WALKS = ["prefill", "last_prefill", "decode"]


def told() -> tuple[RequestTrace, EdgeLogs]:
    story = next(story for story in busy(GRAPH).traces.values() if story.state == "finished")
    return story, {edge.name: chunks(story, edge, GRAPH) for edge in story.edges if not edge.medium}


def test_walks_are_named_by_the_markers_on_the_way_to_a_stage() -> None:
    story, logs = told()
    tasks = {task.stage: task for task in story.tasks}
    spans = find_walk_spans(story, tasks[TALKER], GRAPH, logs)
    assert [span.walk for span in spans] == ALL_WALKS
    assert all(one.to_us == other.from_us for one, other in pairwise(spans))
    assert find_walk_spans(story, tasks[CODE2WAV], GRAPH, logs) == (), "one walk needs no name"


def test_nobody_is_in_a_walk_while_nobody_has_the_task() -> None:
    story, logs = told()
    spans = find_walk_spans(story, next(task for task in story.tasks if task.stage == THINKER), GRAPH, logs)
    lost = next(mark.at_us for mark in story.marks if mark.what == "lost")
    again = next(mark.at_us for mark in story.marks if mark.what == "claimed" and mark.at_us > lost)
    assert list(dict.fromkeys(span.walk for span in spans)) == ["prefill", "decode"] and len({s.worker for s in spans}) == 2
    assert not any(span.from_us < again and span.to_us > lost for span in spans)


def test_a_conductor_that_drives_gives_the_same_walks() -> None:
    story, logs = told()
    unmarked = {edge: [msgspec.structs.replace(chunk, walk=None) for chunk in made] for edge, made in logs.items()}
    task = next(task for task in story.tasks if task.stage == TALKER)
    assert find_walk_spans(story, task, GRAPH, unmarked) == find_walk_spans(story, task, GRAPH, logs)


def test_the_waterfall_and_the_trace_name_them() -> None:
    story, logs = told()
    lane = next(
        lane for lane in build_waterfall(story, GRAPH, logs, assign_colours(GRAPH)).lanes if lane.key == f"walks-{TALKER}"
    )
    assert [span.kind for span in lane.spans] == ["walk"] * 3
    assert all(walk in lane.note and walk in span.detail for walk, span in zip(ALL_WALKS, lane.spans, strict=True))
    assert "decode" in {span.label for span in lane.spans}, "a long one bears its name"
    named = {event.name for event in chrome_trace_of(story, GRAPH, logs).traceEvents if event.ph == "X"}
    assert set(ALL_WALKS) <= named


@pytest.mark.parametrize("source", ["producer", "conductor"])
async def test_a_real_request_has_its_walks(redis_url: str, source: str) -> None:
    with thread_fleet(redis_url, f"stages.talker.transition_source={source}") as fleet:
        async with gateway(fleet) as client:
            spec = fake_spec(fleet)
            await answer(client, spec)
            story = await client.telemetry.trace(spec.id)
            assert story is not None
            logs = {str(edge.name): await client.telemetry.edge_log(spec.id, edge.name) for edge in story.edges}
    found = {task.stage: [span.walk for span in find_walk_spans(story, task, GRAPH, logs)] for task in story.tasks}
    assert found[THINKER] == ["prefill", "decode"] and found[TALKER][-1] == "decode"
    assert found[TALKER] == [walk for walk in ALL_WALKS if walk in found[TALKER]], "in their order, each once"
