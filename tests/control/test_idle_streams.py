"""A gateway compares its idle streams with Redis in few calls, and reads exactly the streams whose
notices were lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import MAX_CONNECTIONS, run_async, text
from fleet.control.stream import ClientStream
from fleet.core.ids import CLIENT, RequestId
from fleet.core.request import RequestSpec
from tests.control_plane import (
    OTHER_GATEWAY,
    REQUEST,
    STAGE,
    TEXT,
    WORKER,
    Control,
    commands_run,
    join,
)
from tests.harness import gateway_at

NUM_IDLE = 250


class Idle:
    """A gateway that reads no inbox, so that every notice is lost, and one request for which the
    test acts as the worker.
    """

    def __init__(self, client: redis.Redis, gateway: FleetClient) -> None:
        self.client, self.gateway = client, gateway
        self.control = Control(client).lead()
        assert join(client, WORKER) == ["ok"]
        self.read: list[RequestId] = []

    async def submit(self, request: RequestId) -> ClientStream:
        spec = RequestSpec(id=request, graph="text", prompt_ids=(1,), outputs=(TEXT,))
        return await self.gateway.requests.submit(spec, None)

    async def catch_up(self) -> list[RequestId]:
        """Let the gateway compare its streams with Redis; return the requests whose logs it
        read.
        """
        self.read.clear()
        await self.gateway.requests.recovery.catch_up()
        return list(self.read)

    async def settle(self) -> None:
        """Let the gateway note that its streams advanced, then acknowledge the chunks it read."""
        await self.catch_up()
        await self.catch_up()


@pytest.fixture
async def idle(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Idle]:
    config = load_config(
        None, ("engine=fake", "device=cpu", "graph=text", "limits.max_requests=1000")
    )
    gateway = await FleetClient.connect(redis_url, config)
    await gateway._membership.register()  # pyright: ignore[reportPrivateUsage]
    await gateway.requests.start()
    bench = Idle(client, gateway)
    catch_up = ClientStream.catch_up

    async def record(stream: ClientStream) -> None:
        bench.read.append(stream.request_id)
        await catch_up(stream)

    monkeypatch.setattr(ClientStream, "catch_up", record)
    yield bench
    await gateway.stop()


async def test_idle_streams_are_compared_in_few_calls(idle: Idle) -> None:
    for number in range(NUM_IDLE):
        await idle.submit(RequestId(f"req-{number}"))
    await idle.catch_up()
    idle.client.config_resetstat()
    assert await idle.catch_up() == []
    counts = commands_run(idle.client)
    assert "xrange" not in counts and counts["evalsha"] < NUM_IDLE / 10


def append(idle: Idle, index: int = 1) -> None:
    assert idle.control.append(idle.control.epoch(), index) == "ok"


def grant_again(idle: Idle) -> None:
    assert idle.control.redeliver(idle.control.epoch()) == "ok"


def lose_acknowledgements(idle: Idle) -> None:
    idle.client.hdel(keys.task(REQUEST, CLIENT), f"consumed:{TEXT}")


def end(idle: Idle) -> None:
    assert idle.control.fail() == "ok"


def lose_request(idle: Idle) -> None:
    """Remove the request from Redis, as a restart without the last writes does."""
    idle.client.delete(keys.request(REQUEST), keys.task(REQUEST, CLIENT), keys.task(REQUEST, STAGE))
    idle.client.srem(keys.LIVE, REQUEST)


def attach_elsewhere(idle: Idle) -> None:
    assert idle.control.register(OTHER_GATEWAY, "") == "ok"
    assert idle.control.attach(OTHER_GATEWAY) == "ok"


@pytest.mark.parametrize(
    "cause", [append, grant_again, lose_acknowledgements, end, lose_request, attach_elsewhere]
)
async def test_stream_is_read_once_redis_has_something_new_for_it(
    idle: Idle, cause: Callable[[Idle], None]
) -> None:
    stream, _ = await idle.submit(REQUEST), await idle.submit(RequestId("req-other"))
    idle.control.own()
    append(idle, 0)
    await idle.catch_up()
    assert (await anext(stream)).index == 0
    await idle.settle()
    assert await idle.catch_up() == []
    cause(idle)
    assert await idle.catch_up() == [REQUEST]


async def test_stream_waits_for_a_submission_that_is_slow(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream whose request Redis does not have yet, because the submission is slow, waits: the
    absence is no proof that the answer has ended.
    """
    sent, arrives = asyncio.Event(), asyncio.Event()

    async def run_late(client: Redis, call: scripts.Call) -> object:
        sent.set()
        await arrives.wait()
        return await run_async(client, call)

    monkeypatch.setattr(idle.gateway.requests, "_replicate", run_late)
    submission = asyncio.create_task(idle.submit(REQUEST))
    await sent.wait()
    assert await idle.catch_up() == []
    arrives.set()
    stream = await submission
    idle.control.own()
    append(idle, 0)
    assert await idle.catch_up() == [REQUEST]
    assert (await anext(stream)).index == 0


async def test_chunk_without_a_notice_is_received_and_acknowledged(idle: Idle) -> None:
    stream = await idle.submit(REQUEST)
    epoch = idle.control.own()
    for index in range(2):
        assert idle.control.append(epoch, index, finish=index == 1) == "ok"
    await idle.catch_up()
    assert [(await anext(stream)).index for _ in range(2)] == [0, 1]
    await idle.settle()
    assert text(idle.client.hget(keys.task(REQUEST, CLIENT), f"consumed:{TEXT}")) == "2"


async def test_gateway_with_open_connections_opens_no_more_under_load(redis_url: str) -> None:
    config = load_config(None, ("engine=fake", "device=cpu"))
    async with gateway_at(redis_url, config) as client:
        await client.open_connections()
        pool: Any = client._redis.connection_pool  # pyright: ignore[reportPrivateUsage]

        def connections() -> set[int]:
            return {id(each) for each in (*pool._available_connections, *pool._in_use_connections)}

        opened = connections()
        assert len(opened) == MAX_CONNECTIONS
        assert all(each.is_connected for each in pool._available_connections)
        await asyncio.gather(*(client.ping() for _ in range(10 * MAX_CONNECTIONS)))
        assert connections() == opened


async def test_connections_are_opened_one_after_the_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway opens its connections one after the other: concurrent TLS handshakes on a loaded
    machine would all exceed their time limit.
    """
    opening: list[object] = []
    most = 0
    connect_one = AbstractConnection.connect

    async def counted(connection: AbstractConnection) -> None:
        nonlocal most
        opening.append(connection)
        most = max(most, len(opening))
        await connect_one(connection)
        opening.remove(connection)

    async with gateway_at(redis_url, load_config(None, ("engine=fake", "device=cpu"))) as client:
        with monkeypatch.context() as patch:
            patch.setattr(AbstractConnection, "connect", counted)
            await client.open_connections()
    num_loops = 4  # of the gateway: each may open a connection meanwhile
    assert 0 < most <= 1 + num_loops
