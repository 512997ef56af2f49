"""Any worker may die at any time: another goes on where its log ends, and the answer is the undisturbed one to the byte."""

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import pytest
import redis

from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.core.errors import FleetError
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.worker.loop import WorkerLoop
from tests.harness import ThreadFleet, answer, fake_spec, gateway, held, thread_fleet
from tests.support import wait_until

NUM_TOKENS = 40
Answer = Mapping[EdgeName, np.ndarray]
Disturb = Callable[[int], None]


async def heard(client: FleetClient, spec: RequestSpec, blob: bytes | None, disturb: Disturb) -> Answer:
    """The answer, chunk by chunk; `disturb` is called with the number of chunks taken so far."""
    parts: dict[EdgeName, list[np.ndarray]] = {edge: [] for edge in spec.outputs}
    taken = 0
    async for chunk in await client.submit(spec, blob):
        assert chunk.index == len(parts[chunk.edge]), "a chunk came twice, or one is missing"
        arrays = [np.frombuffer(tensor.data or b"", tensor.dtype) for tensor in chunk.tensors.values()]
        parts[chunk.edge].append(np.concatenate(arrays) if arrays else np.empty(0, np.int16))
        taken += 1
        await asyncio.to_thread(disturb, taken)  # the gateway's lease is renewed meanwhile
    return {edge: np.concatenate(arrays) for edge, arrays in parts.items()}


def assert_equal(got: Answer, expected: Answer) -> None:
    assert {edge: len(array) for edge, array in got.items()} == {edge: len(array) for edge, array in expected.items()}
    for edge, array in got.items():
        np.testing.assert_array_equal(array, expected[edge], err_msg=str(edge))


def in_step(graph: str) -> tuple[str, ...]:
    """So few credits that no stage runs ahead of the listener: each is still at work when it is killed."""
    edges = ("text", "thought", "codes", "audio") if graph == "qwen3_omni" else ("text",)
    return (f"graph={graph}", *(f"edges.{edge}.credits=2" for edge in edges))


def replace(fleet: ThreadFleet, spec: RequestSpec, stage: StageName) -> None:
    """Kill whoever runs the stage; a new worker has joined before."""
    dying = fleet.owner(spec.id, stage)
    fleet.add_worker(stage)
    fleet.kill(dying)


@pytest.mark.parametrize("after", [1, 7, 23])
@pytest.mark.parametrize("graph", ["qwen3_omni", "text"])
async def test_each_stage_killed_leaves_the_answer_whole(redis_url: str, graph: str, after: int) -> None:
    with thread_fleet(redis_url, *in_step(graph)) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
            for stage in fleet.config.graph_declaration().stages:
                spec = fake_spec(fleet, num_tokens=NUM_TOKENS)

                def kill(taken: int, spec: RequestSpec = spec, stage: StageName = stage.name) -> None:
                    if taken in (after, after + 9):
                        replace(fleet, spec, stage)

                assert_equal(await heard(client, spec, None, kill), expected)
        wait_until(lambda: not held(fleet), "workers to hold nothing")


async def test_every_stage_killed_at_once(redis_url: str) -> None:
    with thread_fleet(redis_url, *in_step("qwen3_omni")) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
            spec = fake_spec(fleet, num_tokens=NUM_TOKENS)

            def kill(taken: int) -> None:
                if taken == 15:
                    for stage in fleet.config.graph_declaration().stages:
                        replace(fleet, spec, stage.name)

            assert_equal(await heard(client, spec, None, kill), expected)


async def test_a_worker_that_wakes_after_its_lease_writes_nothing(redis_url: str) -> None:
    """It was not dead but slow: all it does from then on is refused, and it drops what it held."""
    with thread_fleet(redis_url, *in_step("qwen3_omni")) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
            spec = fake_spec(fleet, num_tokens=NUM_TOKENS)

            def bury(taken: int) -> None:
                if taken == 9:
                    stale = fleet.owner(spec.id, StageName("talker"))
                    fleet.add_worker(StageName("talker"))
                    fleet.bury(stale)
                    wait_until(lambda: stale.worker in fleet.killed, "the stale worker to find out")

            assert_equal(await heard(client, spec, None, bury), expected)


async def test_a_request_that_kills_its_worker_alone_becomes_a_dead_letter_and_its_mate_does_not(redis_url: str) -> None:
    with thread_fleet(redis_url, *in_step("text")) as fleet:
        (stage,) = (each.name for each in fleet.config.graph_declaration().stages)
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
            # Nobody reads either answer at first, so both stand still: no death is excused by progress.
            poison = await client.submit(fake_spec(fleet, num_tokens=NUM_TOKENS), None)
            mate = await client.submit(fake_spec(fleet, num_tokens=NUM_TOKENS), None)
            for death in range(3):
                await asyncio.to_thread(kill_over, fleet, poison.request_id, stage, death)
            with pytest.raises(FleetError, match=f"3 workers of stage {stage} died") as caught:
                _ = [chunk async for chunk in poison]
            assert caught.value.code == "worker_lost"
            ids = [np.frombuffer(tensor.data or b"", np.int32) async for chunk in mate for tensor in chunk.tensors.values()]
            np.testing.assert_array_equal(np.concatenate(ids), expected[EdgeName("text")])
        with redis.Redis.from_url(redis_url) as reader:
            letters = cast("list[tuple[bytes, dict[bytes, bytes]]]", reader.xrange(keys.DEAD))
        assert [fields[b"r"].decode() for _, fields in letters] == [poison.request_id]


def kill_over(fleet: ThreadFleet, request: RequestId, stage: StageName, death: int) -> None:
    dying = fleet.owner(request, stage)
    wait_until(lambda: stands_still(dying, request), "it to stand still")
    assert (set(dying.tasks) == {request}) == (death == 2), "only the third worker runs it alone"
    for _ in range(2 if death == 1 else 1):
        fleet.add_worker(stage)
    fleet.kill(dying)


def stands_still(loop: WorkerLoop, request: RequestId) -> bool:
    task = loop.tasks.get(request)
    return task is not None and task.paused
