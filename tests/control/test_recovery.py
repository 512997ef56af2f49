"""Any worker may die at any time: the answer equals the undisturbed one, and no conductor is needed
on the normal path.
"""

import asyncio

import pytest

from fleet.control import keys
from fleet.control.connect import text
from fleet.core.ids import EdgeName, StageName
from fleet.graphs import DEFAULT_GRAPH
from tests.control_plane import MAX_DEATHS
from tests.disturbances import OMNI, replace_worker
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    collected,
    fake_spec,
    held,
    open_fleet,
    stop_claims,
    wait_ended,
    wait_none_live,
)
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

SOURCE, SINK = OMNI.stages[0].name, OMNI.stages[-1].name


async def test_answers_with_joined_tokens_are_complete_after_their_worker_is_killed(
    redis_url: str,
) -> None:
    """Answers whose tokens are joined in chunks are complete after their worker is killed. Few
    credits keep every answer unfinished until then.
    """
    joined = ("edges.text.policy={kind: each, max_chunks_per_s: 100}", "edges.text.credits=4")
    async with open_fleet(redis_url, "graph=text", *joined) as (fleet, client):
        expected = await answer(client, fake_spec(fleet, num_tokens=2000))
        specs, num_chunks = [fake_spec(fleet, num_tokens=2000) for _ in range(4)], [0]

        def kill(edge: EdgeName, index: int) -> None:
            num_chunks[0] += 1
            if index == 4:
                replace_worker(fleet, specs[0], StageName("lm"))

        others = [asyncio.create_task(answer(client, spec)) for spec in specs[1:]]
        assert_same(await answer_disturbed(client, specs[0], None, kill), expected)
        for got in await asyncio.gather(*others):
            assert_same(got, expected)
        assert num_chunks[0] < 2000, "tokens share chunks"


async def test_task_waiting_for_first_input_is_no_suspect(redis_url: str) -> None:
    """A task that waits for its first input is no suspect: its workers die one after another, no
    death is counted, and the task is answered as usual.
    """
    async with open_fleet(redis_url) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        slow = next(loop for loop in fleet.loops if loop.stage == SOURCE)
        await asyncio.to_thread(stop_claims, slow)
        stream = await client.requests.submit(spec := fake_spec(fleet), None)
        for _ in range(MAX_DEATHS + 2):
            await asyncio.to_thread(replace_worker, fleet, spec, SINK)
        await asyncio.to_thread(fleet.owner, spec.id, SINK)
        assert not fleet.clients[0].hget(keys.task(spec.id, SINK), "deaths")
        slow.availability.draining = False
        assert_same(await collected(stream, spec), expected)


async def test_task_waiting_for_more_input_is_no_dead_letter(redis_url: str) -> None:
    """A task that waits for more input becomes no dead letter: its producer is lost during the
    answer, and no death is counted while the task runs alone and idles.
    """
    slow_source = f"stages.{SOURCE}.extra={{step_ms: 20}}"
    async with open_fleet(redis_url, slow_source) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        stream = await client.requests.submit(spec := fake_spec(fleet), None)
        receiving = asyncio.create_task(collected(stream, spec))
        (into_sink,) = OMNI.edges_to(SINK)

        def task_field(field: str, stage: StageName) -> str:
            return text(fleet.clients[0].hget(keys.task(spec.id, stage), field))

        def num_produced() -> str:
            return task_field(f"produced:{into_sink.name}", into_sink.source)

        def is_idle() -> bool:
            return (
                task_field("alone", SINK) == "1"
                and task_field(f"idle_consumed:{into_sink.name}", SINK) == num_produced()
            )

        def kill_workers() -> None:
            wait_until(num_produced, "a part of the answer to be produced")
            fleet.kill(fleet.owner(spec.id, SOURCE))
            for _ in range(10):  # a death after progress restarts the count
                replace_worker(fleet, spec, SINK)
                wait_until(
                    lambda: task_field("state", SINK) == "running", "another worker to continue"
                )
                if task_field("alone", SINK) == "1":
                    break
            for _ in range(2):
                wait_until(is_idle, "the task to run alone and to have processed all input")
                replace_worker(fleet, spec, SINK)

        await asyncio.to_thread(kill_workers)
        await asyncio.to_thread(fleet.add_worker, SOURCE)
        assert_same(await receiving, expected)


GRAPHS = ("text", DEFAULT_GRAPH)
SPLIT = {"text": "stages.lm.split={}", DEFAULT_GRAPH: "stages.thinker.split={}"}
NUM_TOKENS = 20


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("graph", GRAPHS)
async def test_requests_are_answered_without_a_conductor(
    redis_url: str, graph: str, is_split: bool
) -> None:
    settings = (f"graph={graph}", *([SPLIT[graph]] if is_split else []))
    async with open_fleet(redis_url, *settings, conductor=False) as (fleet, client):
        specs = [fake_spec(fleet, num_tokens=NUM_TOKENS) for _ in range(6)]
        first, *others = await asyncio.gather(*(answer(client, spec) for spec in specs))
        assert all(len(array) for array in first.values())
        for other in others:
            assert_same(other, first)
        for spec in specs:
            assert (await wait_ended(client, spec.id)).state == "finished"
        await wait_none_live(client)
        await asyncio.to_thread(wait_until, lambda: not held(fleet), "workers to hold nothing")
