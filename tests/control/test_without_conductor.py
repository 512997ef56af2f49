"""The normal path of a request needs no conductor: scripts grant its tasks, also those of a fenced
worker, and close it.
"""

import asyncio

import pytest

from fleet.graphs import DEFAULT_GRAPH
from tests.harness import (
    answer,
    assert_same,
    fake_spec,
    held,
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
