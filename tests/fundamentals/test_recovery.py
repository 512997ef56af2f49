"""Any worker may die at any time: another continues where its log ends, and the answer is identical
to the undisturbed one.
"""

import asyncio

import numpy as np
import pytest

from fleet.conductor.step import MAX_DEATHS
from fleet.control import keys
from fleet.control.client import ClientStream, FleetClient
from fleet.control.connect import text
from fleet.control.dead_letters import read_letters
from fleet.core.errors import FleetError, GatewayStopping, NotFound
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import Graph, get_graph
from tests.harness import (
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    collected,
    fake_spec,
    gateway,
    held,
    in_step,
    open_fleet,
    stop_claims,
    thread_fleet,
    wait_ended,
    wait_none_live,
)
from tests.support import await_until, wait_until

OMNI, TEXT = get_graph("qwen3_omni"), get_graph("text")
SOURCE, SINK = OMNI.stages[0].name, OMNI.stages[-1].name


def replace_worker(fleet: ThreadFleet, spec: RequestSpec, stage: StageName) -> None:
    """Add a worker, then kill the one that runs the stage."""
    dying = fleet.owner(spec.id, stage)
    fleet.add_worker(stage)
    fleet.kill(dying)


@pytest.mark.parametrize("at", [0, 3, 15])
@pytest.mark.parametrize("graph", [OMNI, TEXT], ids=lambda graph: graph.name)
async def test_answer_is_complete_after_each_stage_is_killed(
    redis_url: str, graph: Graph, at: int
) -> None:
    with thread_fleet(redis_url, *in_step(graph)) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            for stage in graph.stages:
                spec = fake_spec(fleet)

                def kill(
                    edge: EdgeName,
                    index: int,
                    spec: RequestSpec = spec,
                    stage: StageName = stage.name,
                ) -> None:
                    if edge == graph.edges[0].name and index in (at, at + 4):
                        replace_worker(fleet, spec, stage)

                assert_same(await answer_disturbed(client, spec, None, kill), expected)
        wait_until(lambda: not held(fleet), "workers to hold nothing")


async def test_answer_is_complete_after_all_stages_are_killed_together(redis_url: str) -> None:
    async with open_fleet(redis_url, *in_step(OMNI)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)

        def kill(edge: EdgeName, index: int) -> None:
            if (edge, index) == ("text", 8):
                for stage in OMNI.stages:
                    replace_worker(fleet, spec, stage.name)

        assert_same(await answer_disturbed(client, spec, None, kill), expected)


async def test_worker_resumed_after_its_lease_writes_nothing(redis_url: str) -> None:
    """A slow worker is fenced: all its later writes are refused, and it drops its tasks."""
    async with open_fleet(redis_url, *in_step(OMNI)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)

        def fence_talker(edge: EdgeName, index: int) -> None:
            if (edge, index) == ("text", 5):
                stale = fleet.owner(spec.id, StageName("talker"))
                fleet.add_worker(StageName("talker"))
                fleet.fence(stale)
                wait_until(lambda: stale.worker in fleet.killed, "the stale worker to end")

        assert_same(await answer_disturbed(client, spec, None, fence_talker), expected)


async def test_answers_with_joined_tokens_are_complete_after_their_worker_is_killed(
    redis_url: str,
) -> None:
    """Few credits, so that no answer is over when its worker is killed."""
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


async def test_request_that_kills_its_worker_alone_becomes_the_only_dead_letter(
    redis_url: str,
) -> None:
    with thread_fleet(redis_url, *in_step(TEXT)) as fleet:
        (stage,) = (each_stage.name for each_stage in fleet.config.graph_declaration().stages)
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            # Neither answer is read at first, so both pause: no progress resets the count of
            # deaths.
            poison = await client.requests.submit(fake_spec(fleet), None)
            other = await client.requests.submit(fake_spec(fleet), None)
            for death in range(3):
                both = {poison.request_id, other.request_id}
                together = both if death < 2 else {poison.request_id}
                await asyncio.to_thread(
                    kill_with_tasks, fleet, poison.request_id, together, 2 if death == 1 else 1
                )
            with pytest.raises(FleetError, match=f"3 workers of stage {stage} died") as caught:
                _ = [chunk async for chunk in poison]
            assert caught.value.code == "worker_lost"
            ids = [
                np.frombuffer(tensor.data or b"", np.int32)
                async for chunk in other
                for tensor in chunk.tensors.values()
            ]
            np.testing.assert_array_equal(np.concatenate(ids), expected[EdgeName("text")])
        assert [letter.request for letter in read_letters(fleet.clients[0])] == [poison.request_id]


def kill_with_tasks(
    fleet: ThreadFleet, request: RequestId, together: set[RequestId], num_new: int
) -> None:
    """Add workers, then kill the request's worker while it runs exactly these requests, all
    paused.
    """
    dying = fleet.owner(request, StageName("lm"))
    wait_until(lambda: set(dying.tasks) == together, f"{together} to run together")
    wait_until(lambda: dying.tasks[request].paused, "the task to pause")
    for _ in range(num_new):
        fleet.add_worker(dying.stage)
    fleet.kill(dying)


async def test_task_waiting_for_first_input_is_no_suspect(redis_url: str) -> None:
    """Its workers die one after another before it has input: no death is counted, and it is
    answered as usual.
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
    """Its producer is lost during the answer. A death is not counted once the task runs alone and
    idles.
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


async def read_some(stream: ClientStream) -> None:
    async for chunk in stream:
        if chunk.index == 3:
            return


async def resume(client: FleetClient, spec: RequestSpec) -> ClientStream:
    resumed = await client.requests.resume(spec.id)
    assert resumed is not None and resumed[0] == spec
    return resumed[1]


async def test_answer_is_resumed_at_another_gateway_and_the_first_cannot_abort(
    redis_url: str,
) -> None:
    with thread_fleet(redis_url, *in_step(OMNI)) as fleet:
        async with gateway(fleet) as first, gateway(fleet) as second:
            expected = await answer(first, fake_spec(fleet))
            spec = fake_spec(fleet)
            held_by_first = await first.requests.submit(spec, None)
            await read_some(held_by_first)
            resumed = await resume(second, spec)
            await held_by_first.abort("the client left")
            assert_same(await collected(resumed, spec), expected)
            assert_same(await collected(await resume(first, spec), spec), expected)
            assert await first.requests.resume(RequestId("req-none")) is None


async def test_resume_of_an_expired_answer_raises_not_found(redis_url: str) -> None:
    """The audio log expires before the text log."""
    async with open_fleet(redis_url, *in_step(OMNI)) as (fleet, client):
        spec = fake_spec(fleet)
        expected = await answer(client, spec)
        assert (await wait_ended(client, spec.id)).state == "finished"
        left_s = [
            fleet.clients[0].ttl(keys.edge(spec.id, EdgeName(edge))) for edge in ("text", "audio")
        ]
        assert left_s[1] <= 60 < left_s[0] <= fleet.config.retention_s
        resumed = await resume(client, spec)
        assert_same(await collected(resumed, spec), expected)
        fleet.clients[0].delete(keys.edge(spec.id, EdgeName("audio")))
        with pytest.raises(NotFound, match="deleted after a minute"):
            await client.requests.resume(spec.id)


async def test_detached_answers_are_resumed_at_another_gateway(redis_url: str) -> None:
    with thread_fleet(redis_url, *in_step(OMNI)) as fleet:
        spec = fake_spec(fleet)
        async with gateway(fleet) as other:
            expected = await answer(other, fake_spec(fleet))
            async with gateway(fleet) as leaving:
                stream = await leaving.requests.submit(spec, None)
                await anext(stream)
                leaving.requests.detach_all()
                with pytest.raises(GatewayStopping):
                    await collected(stream, spec)
            resumed = await resume(other, spec)
            assert_same(await collected(resumed, spec), expected)


async def test_answer_without_a_client_finishes_and_can_be_resumed(redis_url: str) -> None:
    async with open_fleet(redis_url, *in_step(OMNI)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)
        stream = await client.requests.submit(spec, None)
        await read_some(stream)
        stream.run_on()
        await wait_none_live(client)
        resumed = await resume(client, spec)
        stream.run_on()  # the gateway found it without a listener only after its client returned
        assert_same(await collected(resumed, spec), expected)


async def test_answer_without_a_client_is_aborted_after_the_timeout(redis_url: str) -> None:
    settings = ("web.send_timeout_s=0.1", *in_step(OMNI))
    async with open_fleet(redis_url, *settings) as (fleet, client):
        spec = fake_spec(fleet, num_tokens=10_000)
        stream = await client.requests.submit(spec, None)
        await anext(stream)
        stream.run_on()
        await wait_none_live(client)
        assert fleet.clients[0].hget(keys.request(spec.id), "state") == b"aborted"


async def test_answer_resumed_at_the_same_gateway_outlives_its_older_connection(
    redis_url: str,
) -> None:
    """A client whose network broke resumes its answer, perhaps long before its old connection is
    known to be gone.
    """
    async with open_fleet(redis_url, "lease.worker_ttl_s=0.5", *in_step(OMNI)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)
        older = await client.requests.submit(spec, None)
        await read_some(older)
        resumed = await resume(client, spec)
        await older.abort("the client left")
        deadlines = [fleet.clients[0].zscore(keys.WORKERS, client.id)]

        async def renewed() -> bool:
            deadlines.append(fleet.clients[0].zscore(keys.WORKERS, client.id))
            return len(set(deadlines)) > 3

        await await_until(renewed, "several renewals of the gateway's lease")
        assert_same(await collected(resumed, spec), expected)


async def test_request_that_no_gateway_resumes_is_aborted(redis_url: str) -> None:
    with thread_fleet(redis_url, "lease.gateway_timeout_s=0.5", *in_step(OMNI)) as fleet:
        async with gateway(fleet) as watching:
            async with gateway(fleet) as client:
                spec = fake_spec(fleet)
                await client.requests.submit(spec, None)
            assert (await wait_ended(watching, spec.id)).state == "aborted"
        wait_until(lambda: not held(fleet), "workers to hold nothing")
