"""A request may prescribe its answer, completely or the beginning of it; prescribed tokens are not
sampled.
"""

import msgspec
import numpy as np
import pytest

from fleet.core.ids import EdgeName
from fleet.graphs import Graph, get_graph
from tests.disturbances import on_chunk, replace_worker
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec,
    gateway,
    held,
    in_step,
    open_fleet,
    thread_fleet,
)
from tests.support import wait_until

NUM_TOKENS = 20
GRAPHS = [get_graph("qwen3_omni"), get_graph("text")]
TEXT = EdgeName("text")


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
async def test_prescribed_answer_precedes_sampled_tokens(redis_url: str, graph: Graph) -> None:
    async with open_fleet(redis_url, *in_step(graph)) as (fleet, client):
        sampled = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
        for prescribed in ((7, 8, 9), tuple(range(NUM_TOKENS))):
            received = await answer(
                client,
                msgspec.structs.replace(fake_spec(fleet, num_tokens=NUM_TOKENS), given=prescribed),
            )
            np.testing.assert_array_equal(
                received[TEXT], [*prescribed, *sampled[TEXT][len(prescribed) :]]
            )
            audio_edges = [edge for edge in received if edge != TEXT]
            assert all(not np.array_equal(received[edge], sampled[edge]) for edge in audio_edges), (
                "another text has other audio"
            )


async def test_prescribed_answer_survives_the_death_of_its_worker(redis_url: str) -> None:
    graph = GRAPHS[0]
    with thread_fleet(redis_url, *in_step(graph)) as fleet:
        async with gateway(fleet) as client:
            spec = msgspec.structs.replace(fake_spec(fleet, num_tokens=NUM_TOKENS), given=(7, 8, 9))
            expected = await answer(client, spec)
            again = msgspec.structs.replace(spec, id=fake_spec(fleet).id)

            def replace_all() -> None:
                for stage in graph.stages:
                    replace_worker(fleet, again, stage.name)

            assert_same(
                await answer_disturbed(client, again, None, on_chunk(TEXT, 1, replace_all)),
                expected,
            )
        wait_until(lambda: not held(fleet), "every task to end")
