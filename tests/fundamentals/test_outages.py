"""Answers survive a gateway that leaves and a Redis that restarts: what Redis lost is attached,
appended or acknowledged again.
"""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from fleet.control import keys
from fleet.control.client import ClientStream, FleetClient
from fleet.core.errors import GatewayStopping, ResumedElsewhere
from fleet.core.ids import CLIENT, RequestId, StageName, WorkerId
from fleet.core.request import RequestSpec
from tests.control_plane import OTHER_GATEWAY, Control
from tests.disturbances import OMNI, check_answers, config_in_step, on_chunk, restart_redis
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    collected,
    fake_spec,
    fake_spec_of,
    gateway,
    held,
    in_step,
    open_fleet,
    open_processes,
    thread_fleet,
    wait_ended,
    wait_none_live,
)
from tests.support import RedisProcess, await_until, wait_until

IN_STEP = in_step(OMNI)


def test_gateway_reattaches_only_requests_without_a_newer_gateway(control: Control) -> None:
    back = WorkerId("gateway@test:1:c")
    for gateway_id in (OTHER_GATEWAY, back):
        control.register(gateway_id, "")
    first = control.epoch(CLIENT)
    assert control.attach(OTHER_GATEWAY) == "ok"
    assert control.attach(back, held=first) == "stale"
    assert control.task(CLIENT)["owner"] == OTHER_GATEWAY
    held_at = control.epoch(CLIENT)
    replies = [control.attach(back, held=held_at) for _ in range(2)]
    assert replies == ["ok", "ok"], "the first reply may have been lost"
    assert control.task(CLIENT)["owner"] == back


async def resume(client: FleetClient, spec: RequestSpec) -> ClientStream:
    resumed = await client.requests.resume(spec.id)
    assert resumed is not None and resumed[0] == spec
    return resumed[1]


async def test_answer_is_resumed_at_another_gateway_and_the_first_cannot_abort(
    redis_url: str,
) -> None:
    with thread_fleet(redis_url, *IN_STEP) as fleet:
        async with gateway(fleet) as first, gateway(fleet) as second:
            expected = await answer(first, fake_spec(fleet))
            older = await first.requests.submit(spec := fake_spec(fleet), None)
            await anext(older)
            newer = await resume(second, spec)
            with pytest.raises(ResumedElsewhere):
                await collected(older, spec)
            await older.abort("the client left")
            assert_same(await collected(newer, spec), expected)
            assert_same(await collected(await resume(first, spec), spec), expected)
            assert await first.requests.resume(RequestId("req-none")) is None


async def test_answer_resumed_at_the_same_gateway_outlives_its_older_connection(
    redis_url: str,
) -> None:
    """A client whose network broke resumes its answer at the same gateway, perhaps long before its
    old connection is known to be dead; the end of the old connection must not abort the answer.
    """
    async with open_fleet(redis_url, "lease.worker_ttl_s=0.5", *IN_STEP) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        older = await client.requests.submit(spec := fake_spec(fleet), None)
        await anext(older)
        resumed = await resume(client, spec)
        await older.abort("the client left")
        deadlines: set[object] = set()

        async def renewed() -> bool:
            deadlines.add(fleet.clients[0].zscore(keys.WORKERS, client.id))
            return len(deadlines) > 3

        await await_until(renewed, "several renewals of the gateway's lease")
        assert_same(await collected(resumed, spec), expected)


async def test_answers_of_a_gateway_that_stops_are_resumed_at_another(redis_url: str) -> None:
    with thread_fleet(redis_url, *IN_STEP) as fleet:
        async with gateway(fleet) as other:
            expected = await answer(other, fake_spec(fleet))
            async with gateway(fleet) as leaving:
                stream = await leaving.requests.submit(spec := fake_spec(fleet), None)
                await anext(stream)
                leaving.requests.detach_all()
                with pytest.raises(GatewayStopping):
                    await collected(stream, spec)
            assert_same(await collected(await resume(other, spec), spec), expected)


async def test_answer_without_a_client_finishes_and_can_be_resumed(redis_url: str) -> None:
    async with open_fleet(redis_url, *IN_STEP) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        stream = await client.requests.submit(spec := fake_spec(fleet), None)
        await anext(stream)
        stream.run_on()
        await wait_none_live(client)
        resumed = await resume(client, spec)
        stream.run_on()  # the gateway found it without a listener only after its client returned
        assert_same(await collected(resumed, spec), expected)


async def test_answer_without_a_client_is_aborted_after_the_timeout(redis_url: str) -> None:
    async with open_fleet(redis_url, "web.send_timeout_s=0.1", *IN_STEP) as (fleet, client):
        stream = await client.requests.submit(spec := fake_spec(fleet, num_tokens=10_000), None)
        await anext(stream)
        stream.run_on()
        assert (await wait_ended(client, spec.id)).state == "aborted"


async def test_request_that_no_gateway_resumes_is_aborted(redis_url: str) -> None:
    with thread_fleet(redis_url, "lease.gateway_timeout_s=0.5", *IN_STEP) as fleet:
        async with gateway(fleet) as watching:
            async with gateway(fleet) as client:
                await client.requests.submit(spec := fake_spec(fleet), None)
            assert (await wait_ended(watching, spec.id)).state == "aborted"
        wait_until(lambda: not held(fleet), "workers to hold nothing")


@pytest.mark.parametrize("cut_bytes", [0, 700, 9_000])
async def test_answer_survives_a_killed_redis(
    server: RedisProcess, tmp_path: Path, cut_bytes: int
) -> None:
    """The answer is complete although Redis is killed and may lose its last writes."""
    config = config_in_step()
    async with open_processes(server.url, config) as (_, client):
        restart = partial(restart_redis, server, tmp_path, cut_bytes)
        expected = await check_answers(client, config, restart, at=20, num=1)
        assert_same(await answer(client, fake_spec_of(config)), expected)


async def test_credit_that_redis_lost_is_returned_again(redis_url: str) -> None:
    """Redis keeps the chunks of an edge but loses their acknowledgements: the consumer acknowledges
    again, so that the producer, which waits for credit, continues. Nothing is recomputed.
    """
    async with open_fleet(redis_url, "numerics=invariant", *IN_STEP) as (fleet, client):
        spec = fake_spec(fleet)

        def kill() -> None:
            fleet.kill(fleet.owner(spec.id, StageName("thinker")))

        async def text_is_consumed() -> bool:
            trace = await client.telemetry.trace(spec.id)
            return trace is not None and any(
                edge.name == "text" and edge.produced == edge.consumed > 20 for edge in trace.edges
            )

        expected = await answer(client, fake_spec(fleet))
        received = asyncio.create_task(
            answer_disturbed(client, spec, None, on_chunk("text", 20, kill))
        )
        await await_until(text_is_consumed, "the client to consume the text")
        fleet.clients[0].hset(keys.task(spec.id, CLIENT), "consumed:text", 10)
        fleet.add_worker("thinker")
        assert_same(await received, expected)
