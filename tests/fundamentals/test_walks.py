"""Walk changes: a consumer enters another walk where its edge declares it, whether the producer
marks the boundary or the conductor sets the walk.
"""

import numpy as np
import pytest

from fleet.control import keys, scripts
from fleet.core.ids import EdgeName, Walk
from fleet.graphs import DEFAULT_GRAPH, get_graph
from tests.control_plane import REQUEST, STAGE, TEXT, Control
from tests.harness import answer, assert_same, collected, fake_spec, open_fleet
from tests.support import await_until

DECODE = Walk("decode")


def test_first_decode_item_enters_last_prefill_and_later_items_decode() -> None:
    edge = next(edge for edge in get_graph(DEFAULT_GRAPH).edges if edge.transitions)
    walks = [edge.consumer_walk(DECODE, number) for number in (0, 1, 2, 50)]
    assert walks == ["last_prefill", "decode", "decode", "decode"]


def test_walk_is_set_once_per_index_and_only_by_the_leader(control: Control) -> None:
    def set_walk(leader: str, walk: str) -> str:
        call = scripts.set_walk(leader, "1-0", REQUEST, STAGE, TEXT, 3, Walk(walk))
        return control.run(call)

    assert set_walk("somebody|1", "decode") == "not_leader"
    assert set_walk(control.leader, "decode") == "ok"
    assert set_walk(control.leader, "prefill") == "duplicate"


@pytest.mark.parametrize(
    "override",
    ["async_chunk=false", "transition_source=conductor", "edges.codes.policy={kind: each}"],
)
async def test_answer_is_independent_of_walk_driver_and_chunk_sizes(
    redis_url: str, override: str
) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        expected = await answer(client, fake_spec(fleet, seed=5))
    async with open_fleet(redis_url, override) as (fleet, client):
        assert_same(await answer(client, fake_spec(fleet, seed=5)), expected)


async def test_new_leader_sets_the_walks_that_its_predecessor_missed(redis_url: str) -> None:
    async with open_fleet(redis_url, "transition_source=conductor") as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        walks, fleet.driver.walks = fleet.driver.walks, None
        stream = await client.requests.submit(spec := fake_spec(fleet), None)

        async def text_is_complete() -> bool:
            trace = await client.telemetry.trace(spec.id)
            return trace is not None and any(
                edge.name == TEXT and edge.produced == 40 for edge in trace.edges
            )

        await await_until(text_is_complete, "the whole text, while speech waits for its walk")
        fleet.driver.client.delete(keys.CONDUCTOR)
        fleet.driver.walks = walks
        received = await collected(stream, spec)
    np.testing.assert_array_equal(received[EdgeName("audio")], expected[EdgeName("audio")])
