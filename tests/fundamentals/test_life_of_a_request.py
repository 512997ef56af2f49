"""The life of a request: submitted, granted, claimed, streamed, ended; the answer is independent of
walk driver and chunking.
"""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fleet.control import keys
from fleet.core.errors import FleetError
from fleet.core.ids import EdgeName, StageName
from tests.harness import (
    answer,
    fake_spec,
    gateway,
    held,
    open_fleet,
    stop_claims,
    thread_fleet,
    wait_ended,
)
from tests.support import await_until, wait_until

TEXT, AUDIO = EdgeName("text"), EdgeName("audio")


async def test_every_client_edge_is_delivered_and_the_request_ends(redis_url: str) -> None:
    with thread_fleet(redis_url) as fleet:
        async with gateway(fleet) as client:
            spec = fake_spec(fleet, num_tokens=30)
            received = await answer(client, spec)
            assert len(received[TEXT]) == 30
            assert len(received[AUDIO]) == 30 * 1920
            view = await wait_ended(client, spec.id)
            assert view.state == "finished" and all(
                edge.produced == edge.consumed for edge in view.edges
            )
            assert await client.telemetry.num_live() == 0
        wait_until(lambda: not held(fleet), "workers to hold nothing")


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
        other = await answer(client, fake_spec(fleet, seed=5))
    for edge, samples in expected.items():
        np.testing.assert_array_equal(samples, other[edge])


async def test_new_leader_sets_walks_its_predecessor_missed(redis_url: str) -> None:
    """The conductor that drives the walks misses the transitions, then another takes the lead."""
    async with open_fleet(redis_url, "transition_source=conductor") as (fleet, client):
        expected = await answer(client, fake_spec(fleet, seed=9))
        driver = fleet.driver
        driver.state = replace(driver.state, conductor_driven=frozenset())
        stream = await client.requests.submit(fake_spec(fleet, seed=9), None)
        stages = {edge.name: edge for edge in fleet.config.graph_declaration().edges}

        async def text_is_complete() -> bool:
            view = await client.telemetry.trace(stream.request_id)
            return view is not None and any(
                e.name == stages[TEXT].name and e.produced == 40 for e in view.edges
            )

        await await_until(text_is_complete, "the whole text, while speech waits for its walk")
        fleet.driver.client.delete(keys.CONDUCTOR)
        samples = [
            np.frombuffer(tensor.data or b"", tensor.dtype)
            async for chunk in stream
            if chunk.edge == AUDIO
            for tensor in chunk.tensors.values()
        ]
    np.testing.assert_array_equal(np.concatenate(samples), expected[AUDIO])


async def test_more_requests_than_slots_all_end(redis_url: str) -> None:
    """Grants wait in the role's stream until a slot is free; the oldest request always has all its
    slots.
    """
    async with open_fleet(redis_url, "stages.thinker.max_batch=2", "stages.talker.max_batch=3") as (
        fleet,
        client,
    ):
        specs = [fake_spec(fleet, seed=i, num_tokens=20) for i in range(12)]
        answers = await asyncio.gather(*(answer(client, spec) for spec in specs))
        assert all(len(a[AUDIO]) == 20 * 1920 for a in answers)


async def test_stage_that_ends_early_does_not_block_its_producer(redis_url: str) -> None:
    """Audio is limited to far less than the text, and the edge between them has few credits: the
    text is still complete.
    """
    async with open_fleet(redis_url, "edges.thought.credits=4") as (fleet, client):
        spec = fake_spec(fleet, num_tokens=60)
        short = msgspec.structs.replace(spec.sampling[StageName("talker")], max_tokens=5)
        spec = msgspec.structs.replace(spec, sampling={**spec.sampling, StageName("talker"): short})
        received = await answer(client, spec)
        assert (len(received[TEXT]), len(received[AUDIO])) == (60, 5 * 1920)


async def test_request_for_a_drained_role_fails_naming_it(redis_url: str) -> None:
    async with open_fleet(
        redis_url, "lease.no_worker_timeout_s=0.5", "lease.claim_timeout_s=0.2"
    ) as (fleet, client):
        draining = next(loop for loop in fleet.loops if loop.stage == "talker")
        stop_claims(draining)
        stream = await client.requests.submit(fake_spec(fleet), None)
        for key in (keys.WORKERS, keys.role_workers(draining.role, "accepting")):
            fleet.driver.client.zrem(key, draining.worker)
        with pytest.raises(FleetError, match="no worker serves the role talker"):
            async for _ in stream:
                pass


async def test_slow_client_blocks_only_its_own_producers(redis_url: str) -> None:
    """A stream that is not read stops at its credit; another request finishes meanwhile."""
    async with open_fleet(redis_url, "edges.text.credits=8", "edges.audio.credits=4") as (
        fleet,
        client,
    ):
        slow = await client.requests.submit(fake_spec(fleet, num_tokens=200), None)
        received = await answer(client, fake_spec(fleet, num_tokens=60))
        assert len(received[TEXT]) == 60
        view = await client.telemetry.trace(slow.request_id)
        assert view is not None
        produced = {edge.name: edge.produced for edge in view.edges}
        assert produced[TEXT] <= 8 + 1
        assert produced[AUDIO] <= 4 + 25
        chunks = [chunk async for chunk in slow]
        assert sum(chunk.edge == "text" for chunk in chunks) == 200
