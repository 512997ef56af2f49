"""What a gateway owes to Redis is kept until Redis has answered: aborts, final acknowledgements and
detachments. Places are free as soon as Redis is back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run, text
from fleet.control.endings import BELOW_ALL, Abort, Detach, Ending, EndingsOwed, FinalAcks
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import CLIENT, Epoch, RequestId
from fleet.graphs import get_graph
from tests.control_plane import (
    GATEWAY,
    OTHER_GATEWAY,
    REQUEST,
    STAGE,
    TEXT,
    WORKER,
    Control,
)
from tests.disturbances import config_in_step
from tests.harness import (
    answer,
    collected,
    fake_spec,
    fake_spec_of,
    gateway_at,
    in_step,
    open_fleet,
    open_processes,
    wait_ended,
)
from tests.support import RedisProcess, await_until

NUM_CLIENTS = 16
NEVER_S = "lease.gateway_timeout_s=3600"
"""Setting in which no request ends because its gateway is absent: only what the gateway owes ends
it.
"""


async def leave_while_away(server: RedisProcess, client: FleetClient, away_s: float) -> float:
    """Fill the fleet with requests, and let all clients leave while Redis is away for `away_s`.
    Return the seconds from Redis's return until a new request is admitted at the bound.
    """
    config = client.config
    streams = [await client.requests.submit(fake_spec_of(config), None) for _ in range(NUM_CLIENTS)]
    for stream in streams:
        await anext(stream)
    await asyncio.to_thread(server.stop)
    returns_s = time.monotonic() + away_s
    await asyncio.gather(*(stream.abort("the client left") for stream in streams))
    await await_until(lambda: _is_past(returns_s), "the end of the outage")
    await asyncio.to_thread(server.start)
    back_s = time.monotonic()
    admitted = await client.requests.submit(fake_spec_of(config), None)
    took_s = time.monotonic() - back_s
    await admitted.abort("the test is over")
    return took_s


async def _is_past(at_s: float) -> bool:
    return time.monotonic() >= at_s


async def test_places_of_clients_that_left_while_redis_was_away_are_free_at_its_return(
    own_redis: RedisProcess,
) -> None:
    """The first request after Redis's return is admitted, although all places were taken."""
    config = config_in_step(f"limits.max_requests={NUM_CLIENTS}", NEVER_S)
    async with open_processes(own_redis.url, config) as (_, client):
        took_s = await leave_while_away(own_redis, client, away_s=0.7)
        print(f"a request was admitted at the bound {took_s * 1000:.0f} ms after Redis's return")
        await none_live(client)


async def none_live(client: FleetClient) -> None:
    async def ended() -> bool:
        return await client.telemetry.num_live() == 0

    await await_until(ended, "every request to end")


async def test_place_of_a_submission_without_a_reply_is_freed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fleet(redis_url, "graph=text", NEVER_S, *in_step(get_graph("text"))) as (
        fleet,
        client,
    ):
        await answer(client, fake_spec(fleet))
        replicate = client.requests._replicate  # pyright: ignore[reportPrivateUsage]

        async def lose_reply(to: Redis, call: scripts.Call) -> object:
            await replicate(to, call)
            raise RedisConnectionError("the connection broke")

        monkeypatch.setattr(client.requests, "_replicate", lose_reply)
        spec = fake_spec(fleet)
        with pytest.raises(RedisUnreachable):
            await client.requests.submit(spec, None)
        assert (await wait_ended(client, spec.id)).state == "aborted"


async def test_ends_that_redis_lost_are_written_again(redis_url: str) -> None:
    """Redis answered an abort, then lost it: the request is listed as the gateway's again, and is
    aborted again instead of waiting for another client.
    """
    async with open_fleet(redis_url, "graph=text", NEVER_S, *in_step(get_graph("text"))) as (
        fleet,
        client,
    ):
        admin = fleet.clients[0]
        stream = await client.requests.submit(spec := fake_spec(fleet), None)
        await anext(stream)
        of_request = [
            text(key) for key in cast("list[bytes]", admin.keys(f"{keys.request(spec.id)}*"))
        ]
        names = [keys.LIVE, keys.worker_tasks(client.id), *of_request]
        before = {name: cast(bytes, admin.dump(name)) for name in names}
        await stream.abort("the client left")
        assert (await wait_ended(client, spec.id)).state == "aborted"
        for name, value in before.items():
            admin.restore(name, 0, value, replace=True)
        assert (await wait_ended(client, spec.id)).state == "aborted"


async def test_failed_answer_ends_its_request(redis_url: str) -> None:
    """A stream that fails at the gateway, since its chunks do not join, ends the request too."""
    async with open_fleet(redis_url, "graph=text", NEVER_S, *in_step(get_graph("text"))) as (
        fleet,
        client,
    ):
        stream = await client.requests.submit(spec := fake_spec(fleet), None)
        first = await anext(stream)
        stream._give_up(RedisUnreachable("came out shorter"))  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(RedisUnreachable):
            await collected(stream, spec)
        assert first.request == spec.id
        assert (await wait_ended(client, spec.id)).state == "aborted"


@pytest.fixture
def bench(client: redis.Redis) -> Control:
    """A request whose client edges a gateway holds that runs no loops; the test is its worker."""
    return Control(client).lead()


@pytest.fixture
async def holder(redis_url: str, bench: Control, tmp_path: Path) -> AsyncIterator[FleetClient]:
    config = load_config(
        None, ("engine=fake", "graph=text", f"data_dir={tmp_path}", "lease.worker_ttl_s=3600")
    )
    bench.register(GATEWAY, "")
    bench.register(OTHER_GATEWAY, "")
    client = await FleetClient.connect(redis_url, config)
    await client._membership.register()  # pyright: ignore[reportPrivateUsage]
    assert bench.submit(REQUEST)[0] == "ok"
    assert bench.attach(client.id) == "ok"
    yield client
    await client.stop()


def state_of(bench: Control, request: RequestId = REQUEST) -> str:
    return text(bench.client.hget(keys.request(request), "state"))


def abort_at(epoch: Epoch) -> Ending:
    return Abort(request=REQUEST, epoch=epoch, reason="the client left")


def acks_at(epoch: Epoch) -> Ending:
    return FinalAcks(
        request=REQUEST, epoch=epoch, consumed={TEXT: 1}, producers={TEXT: STAGE}, receipts=None
    )


def finish(bench: Control) -> None:
    """Let the worker produce the whole answer."""
    assert bench.register(WORKER) in ("ok", "exists")
    assert bench.append(bench.own(), finish=True) == "ok"


@pytest.mark.parametrize("make", [abort_at, acks_at], ids=["abort", "final acknowledgement"])
async def test_ending_stands_although_its_gateway_was_fenced(
    holder: FleetClient, bench: Control, make: Callable[[Epoch], Ending]
) -> None:
    """A gateway was fenced during an outage; no other gateway has its request. The gateway joins
    again in order to end it.
    """
    if make is acks_at:
        finish(bench)
    held, former = bench.epoch(CLIENT), holder.id
    bench.leave(former, died=True)
    assert bench.epoch(CLIENT) > held
    await holder.requests.endings.settle(make(held))
    assert holder.id != former
    assert state_of(bench) == ("finished" if make is acks_at else "aborted")


@pytest.mark.parametrize("make", [abort_at, acks_at], ids=["abort", "final acknowledgement"])
async def test_ending_is_void_once_another_gateway_has_the_request(
    holder: FleetClient, bench: Control, make: Callable[[Epoch], Ending]
) -> None:
    held = bench.epoch(CLIENT)
    assert bench.attach(OTHER_GATEWAY) == "ok"
    endings = holder.requests.endings
    for ending in (make(held), abort_at(BELOW_ALL)):
        await endings.settle(ending)
        assert not endings.owed and state_of(bench) == "submitted"
    assert bench.task(CLIENT)["owner"] == OTHER_GATEWAY


async def test_ending_is_void_once_its_gateway_reads_the_answer_again(
    holder: FleetClient, bench: Control
) -> None:
    held = bench.epoch(CLIENT)
    resumed = await holder.requests.resume(REQUEST)
    assert resumed is not None
    await holder.requests.endings.settle(abort_at(held))
    assert not holder.requests.endings.owed and state_of(bench) == "submitted"
    await resumed[1].abort("the client left")
    assert state_of(bench) == "aborted"


async def test_submission_that_arrives_after_its_abort_is_aborted(
    holder: FleetClient, bench: Control
) -> None:
    """Redis answered the abort of a lost submission before the submission itself arrived."""
    late = RequestId("req-late")
    endings = holder.requests.endings
    await endings.settle(Abort(request=late, epoch=BELOW_ALL, reason="no reply"))
    assert not endings.owed and bench.submit(late)[0] == "ok"
    assert bench.attach(holder.id, request=late) == "ok"
    await holder.requests.recovery.release_unread()
    assert state_of(bench, late) == "aborted"
    assert bench.task(CLIENT)["state"] == "lost", "the other unread request is detached"


async def test_unread_request_is_detached_each_time_it_is_found(
    holder: FleetClient, bench: Control
) -> None:
    for _ in range(2):
        await holder.requests.recovery.release_unread()
        assert bench.task(CLIENT)["state"] == "lost"
        assert bench.attach(holder.id) == "ok"


def endings_of(numbers: Sequence[int]) -> list[Ending]:
    return [
        Detach(request=RequestId(f"req-{number}"), epoch=Epoch(2), gateway=GATEWAY)
        if number % 3 == 0
        else Abort(request=RequestId(f"req-{number}"), epoch=Epoch(2), reason="left")
        for number in numbers
    ]


async def test_table_of_endings_is_bounded(holder: FleetClient) -> None:
    """The table forgets answered endings first, the oldest first, and then the oldest owed one."""
    membership = holder._membership  # pyright: ignore[reportPrivateUsage]
    client = holder._redis  # pyright: ignore[reportPrivateUsage]
    endings = EndingsOwed(client, membership, bound=10)
    endings._bound = 10  # pyright: ignore[reportPrivateUsage]
    for ending in endings_of(range(6)):
        endings.owe(ending)
    await endings.send()
    assert not endings.owed
    for ending in endings_of(range(10, 22)):
        endings.owe(ending)
    assert endings.owed == {RequestId(f"req-{number}") for number in range(12, 22)}
    assert not endings.owe_again(RequestId("req-1"))


async def test_endings_of_one_outage_are_sent_in_few_round_trips(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    """While Redis is away, each ending is tried once by its caller, and a request is refused with
    one try for all of them; at Redis's return they are sent together.
    """
    config = load_config(None, ("engine=fake", "graph=text", f"data_dir={tmp_path}"))
    async with gateway_at(own_redis.url, config) as client:
        await asyncio.to_thread(own_redis.stop)
        endings = client.requests.endings
        await asyncio.gather(*(endings.settle(ending) for ending in endings_of(range(300))))
        assert len(endings.owed) == 300
        with pytest.raises(RedisUnreachable):
            await client.requests.submit(fake_spec_of(config), None)
        await asyncio.to_thread(own_redis.start)

        async def none_owed() -> bool:
            return not endings.owed

        await await_until(none_owed, "every ending to be answered")


async def test_delivered_answers_end_although_redis_was_away_at_their_end(
    own_redis: RedisProcess,
) -> None:
    """Redis is away while the client reads the last chunks, and the gateway is fenced meanwhile."""
    async with open_fleet(own_redis.url, "graph=text", NEVER_S, "lease.worker_ttl_s=1.0") as (
        fleet,
        client,
    ):
        stream = await client.requests.submit(spec := fake_spec(fleet), None)

        async def has_all() -> bool:
            edges = stream._edges.values()  # pyright: ignore[reportPrivateUsage]
            ready = stream._ready  # pyright: ignore[reportPrivateUsage]
            return bool(edges) and any(chunk.final for chunk in ready)

        await await_until(has_all, "the whole answer to arrive")
        run(fleet.clients[0], scripts.fence_worker("", client.id, died=True))
        fleet.clients[0].config_set("min-replicas-to-write", 1)
        await collected(stream, spec)
        assert spec.id in client.requests.endings.owed and client.requests.num_held == 0
        fleet.clients[0].config_set("min-replicas-to-write", 0)
        assert (await wait_ended(client, spec.id)).state == "finished"
