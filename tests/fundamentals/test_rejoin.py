"""A fenced gateway resumes every answer it held, even if its reattachment is interrupted."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.control import requests as requests_module
from fleet.control import scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run, run_async
from fleet.control.stream import ClientStream
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from tests.harness import ThreadFleet, answer, assert_same, collected, fake_spec, in_step, open_fleet

NUM_TOKENS, NUM_HELD = 20, 3
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

    async def send(redis: Redis, call: scripts.Call) -> object:
        if call.script != "attach" or call.args[0] != request or intercepted:
            return await run_async(redis, call)
        intercepted.append(request)
        return await once(lambda: run_async(redis, call))

    return send


@pytest.mark.parametrize("is_done", [False, True], ids=["before the attach", "before its reply"])
async def test_failed_reattachment_is_repeated_at_the_next_renewal(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    async def lose_connection(send: Send) -> object:
        if is_done:
            await send()
        raise RedisConnectionError("the connection broke")

    async with open_fleet(redis_url, SHORT_LEASE, "lease.gateway_timeout_s=2", *TEXT) as (fleet, client):
        expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
        held = await begin(client, fleet)
        monkeypatch.setattr(requests_module, "run_async", intercept_attach(held[1][0].id, lose_connection))
        fence(fleet, client)
        for received in await asyncio.gather(*(collected(stream, spec) for spec, stream in held)):
            assert_same(received, expected)


async def test_cancelled_caller_does_not_interrupt_the_rejoin(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a further renewal: the caller that found the fence is cancelled during the rejoin, and every answer is resumed."""
    async with open_fleet(redis_url, LONG_LEASE, "lease.gateway_timeout_s=2", *TEXT) as (fleet, client):
        expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
        held = await begin(client, fleet)
        other = fake_spec(fleet, num_tokens=NUM_TOKENS)

        async def cancel_caller(send: Send) -> object:
            left = asyncio.Event()
            cancelled_submit.add_done_callback(lambda _: left.set())
            cancelled_submit.cancel()
            await left.wait()
            return await send()

        monkeypatch.setattr(requests_module, "run_async", intercept_attach(held[1][0].id, cancel_caller))
        fence(fleet, client)
        cancelled_submit = asyncio.create_task(client.requests.submit(other, None))
        with pytest.raises(asyncio.CancelledError):
            await cancelled_submit
        for received in await asyncio.gather(*(collected(stream, spec) for spec, stream in held)):
            assert_same(received, expected)
