"""A fenced gateway resumes every answer it held, even if its reattachment is interrupted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control import requests as requests_module
from fleet.control.client import FleetClient
from fleet.control.connect import run, run_async
from fleet.control.stream import ClientStream
from fleet.core.ids import CLIENT, RequestId
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from tests.control_plane import join
from tests.harness import (
    ThreadFleet,
    answer,
    assert_same,
    collected,
    fake_spec,
    fake_spec_of,
    in_step,
    open_fleet,
)

NUM_TOKENS, NUM_HELD, MANY_HELD = 20, 3, 250
TEXT = in_step(get_graph("text"))
SHORT_LEASE, LONG_LEASE = "lease.worker_ttl_s=0.5", "lease.worker_ttl_s=3600"
Send = Callable[[], Awaitable[object]]


async def begin(client: FleetClient, fleet: ThreadFleet) -> list[tuple[RequestSpec, ClientStream]]:
    """Submit answers that are not read yet: each waits for its credit."""
    held: list[tuple[RequestSpec, ClientStream]] = []
    for _ in range(NUM_HELD):
        spec = fake_spec(fleet, num_tokens=NUM_TOKENS)
        held.append((spec, await client.requests.submit(spec, None)))
    return held


def fence(fleet: ThreadFleet, client: FleetClient) -> None:
    run(fleet.clients[0], scripts.fence_worker("", client.id, died=True))


def intercept_attach(request: RequestId, once: Callable[[Send], Awaitable[object]]) -> object:
    """Return a `run_async` whose first attach of the request is done by `once`."""
    intercepted: list[RequestId] = []

    async def send(client: Redis, call: scripts.Call) -> object:
        if call.script != "attach" or request not in call.args or intercepted:
            return await run_async(client, call)
        intercepted.append(request)
        return await once(lambda: run_async(client, call))

    return send


@pytest.mark.parametrize("is_done", [False, True], ids=["before the attach", "before its reply"])
async def test_failed_reattachment_is_repeated_at_the_next_renewal(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    async def lose_connection(send: Send) -> object:
        if is_done:
            await send()
        raise RedisConnectionError("the connection broke")

    async with open_fleet(redis_url, SHORT_LEASE, "lease.gateway_timeout_s=2", *TEXT) as (
        fleet,
        client,
    ):
        expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
        held = await begin(client, fleet)
        monkeypatch.setattr(
            requests_module, "run_async", intercept_attach(held[1][0].id, lose_connection)
        )
        fence(fleet, client)
        for received in await asyncio.gather(*(collected(stream, spec) for spec, stream in held)):
            assert_same(received, expected)


async def test_cancelled_caller_does_not_interrupt_the_rejoin(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a further renewal: the caller that found the fence is cancelled during the rejoin,
    and every answer is resumed.
    """
    async with open_fleet(redis_url, LONG_LEASE, "lease.gateway_timeout_s=2", *TEXT) as (
        fleet,
        client,
    ):
        expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
        held = await begin(client, fleet)
        other = fake_spec(fleet, num_tokens=NUM_TOKENS)

        async def cancel_caller(send: Send) -> object:
            left = asyncio.Event()
            cancelled_submit.add_done_callback(lambda _: left.set())
            cancelled_submit.cancel()
            await left.wait()
            return await send()

        monkeypatch.setattr(
            requests_module, "run_async", intercept_attach(held[1][0].id, cancel_caller)
        )
        fence(fleet, client)
        cancelled_submit = asyncio.create_task(client.requests.submit(other, None))
        with pytest.raises(asyncio.CancelledError):
            await cancelled_submit
        for received in await asyncio.gather(*(collected(stream, spec) for spec, stream in held)):
            assert_same(received, expected)


@pytest.fixture
async def holder(redis_url: str, client: redis.Redis) -> AsyncIterator[FleetClient]:
    """A gateway that holds `MANY_HELD` requests of a fleet whose workers do nothing."""
    gateway = await FleetClient.connect(
        redis_url, load_config(None, ("engine=fake", LONG_LEASE, "limits.max_requests=1000"))
    )
    for role in gateway.config.roles():
        assert join(client, f"{role.name}@test:1:a") == ["ok"]
    await gateway.start()
    for _ in range(MANY_HELD):
        await gateway.requests.submit(fake_spec_of(gateway.config), None)
    yield gateway
    await gateway.stop()


async def test_many_streams_are_reattached_in_few_calls(
    client: redis.Redis, holder: FleetClient
) -> None:
    held = client.smembers(keys.worker_tasks(holder.id))
    run(client, scripts.fence_worker("", holder.id, died=True))
    client.config_resetstat()
    other = await holder.requests.submit(fake_spec_of(holder.config), None)
    stats = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    assert client.smembers(keys.worker_tasks(holder.id)) == {
        *held,
        f"{other.request_id}|{CLIENT}".encode(),
    }
    assert stats["cmdstat_evalsha"]["calls"] < MANY_HELD / 10
