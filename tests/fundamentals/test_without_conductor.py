"""The normal path of a request needs no conductor: scripts grant its tasks, also those of a fenced
worker, and close it.
"""

import asyncio

import pytest

from fleet.core.ids import StageName
from fleet.graphs import DEFAULT_GRAPH, get_graph
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec,
    held,
    in_step,
    open_fleet,
    wait_ended,
    wait_none_live,
)
from tests.support import wait_until

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


@pytest.mark.parametrize(
    "stage", [StageName("lm"), *(stage.name for stage in get_graph(DEFAULT_GRAPH).stages)]
)
async def test_killed_worker_is_replaced_without_a_conductor(
    redis_url: str, stage: StageName
) -> None:
    """Its keeper fences it, which grants its task to another worker of the role."""
    graph = get_graph("text" if stage == "lm" else DEFAULT_GRAPH)
    async with open_fleet(redis_url, *in_step(graph), conductor=False) as (fleet, client):
        expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
        spec, killed = fake_spec(fleet, num_tokens=NUM_TOKENS), list[str]()

        def kill(edge: str, index: int) -> None:
            if (edge, index) == (graph.edges[0].name, 4):
                loop = fleet.owner(spec.id, stage)
                killed.append(loop.worker)
                fleet.add_worker(loop.role)
                fleet.kill(loop)

        assert_same(await answer_disturbed(client, spec, None, kill), expected)
        assert len(killed) == 1 and (await wait_ended(client, spec.id)).state == "finished"
