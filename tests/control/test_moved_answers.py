"""An answer that moved between gateways has one reader, even after Redis lost the write that moved
it. A fenced gateway resumes every answer that it held.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.config import load_config
from fleet.control import keys, membership, scripts, stream_recovery
from fleet.control import requests as requests_module
from fleet.control.client import FleetClient, VoiceHold
from fleet.control.connect import run, run_and_read, run_async, text
from fleet.control.stream import ClientStream
from fleet.core.errors import ResumedElsewhere
from fleet.core.ids import CLIENT, RequestId, StageName, WorkerId
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from tests.control_plane import commands_run, join
from tests.harness import (
    EdgeArrays,
    ThreadFleet,
    answer,
    assert_same,
    collected,
    fake_spec,
    fake_spec_of,
    gateway,
    in_step,
    open_fleet,
    thread_fleet,
    wait_ended,
)
from tests.support import await_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

LM = StageName("lm")
IN_STEP = in_step(get_graph("text"))
NUM_RENEWALS = 4
SETTINGS = (*IN_STEP, "lease.worker_ttl_s=3600", "lease.gateway_timeout_s=3600")
"""Settings in which only the test renews leases, and nothing is aborted because its gateway is
absent.
"""


@dataclass(slots=True)
class Holders:
    """Redis's record of which gateway reads one answer. `write_back` restores it, as if Redis had
    lost all later writes.
    """

    client: redis.Redis
    request: RequestId
    gateways: tuple[WorkerId, ...]
    task: dict[bytes, bytes]
    held: tuple[set[bytes], ...]
    listed: list[tuple[bytes, float]]

    @staticmethod
    def read(client: redis.Redis, request: RequestId, *gateways: WorkerId) -> "Holders":
        task = cast("dict[bytes, bytes]", client.hgetall(keys.task(request, CLIENT)))
        held = tuple(
            cast("set[bytes]", client.smembers(keys.worker_tasks(name))) for name in gateways
        )
        listed = cast(
            "list[tuple[bytes, float]]", client.zrange(keys.WORKERS, 0, -1, withscores=True)
        )
        return Holders(client, request, gateways, task, held, listed)

    def write_back(self) -> None:
        key = keys.task(self.request, CLIENT)
        counts = {
            name: value
            for name, value in cast("dict[bytes, bytes]", self.client.hgetall(key)).items()
            if name.startswith(b"consumed:")
        }
        self.client.delete(key)
        self.client.hset(key, mapping={**self.task, **counts})
        for holder, pairs in zip(self.gateways, self.held, strict=True):
            self.client.delete(keys.worker_tasks(holder))
            if pairs:
                self.client.sadd(keys.worker_tasks(holder), *pairs)
        listed = {text(name) for name, _ in self.listed}
        for name in cast("list[bytes]", self.client.zrange(keys.WORKERS, 0, -1)):
            if text(name) not in listed:
                self.client.zrem(keys.WORKERS, name)
                self.client.delete(keys.worker(WorkerId(text(name))))


@dataclass(slots=True)
class Moving:
    fleet: ThreadFleet
    first: FleetClient
    second: FleetClient
    expected: EdgeArrays

    @property
    def redis(self) -> redis.Redis:
        return self.fleet.clients[0]

    async def begin(self) -> tuple[RequestSpec, ClientStream]:
        """Begin an answer at the first gateway; on return, its reader has the first chunk and its
        workers wait for credit.
        """
        spec = fake_spec(self.fleet)
        stream = await self.first.requests.submit(spec, None)
        await anext(stream)
        return spec, stream

    async def resume(self, spec: RequestSpec) -> ClientStream:
        found = await self.second.requests.resume(spec.id)
        assert found is not None
        return found[1]


@asynccontextmanager
async def two_gateways(url: str, *settings: str) -> AsyncIterator[Moving]:
    with thread_fleet(url, "graph=text", *SETTINGS, *settings) as fleet:
        async with gateway(fleet) as first, gateway(fleet) as second:
            expected = await answer(first, fake_spec(fleet))
            yield Moving(fleet, first, second, expected)


async def test_lost_attach_neither_aborts_an_answer_nor_returns_it_to_the_former_gateway(
    redis_url: str,
) -> None:
    async with two_gateways(redis_url) as moving:
        spec, _ = await moving.begin()
        before = Holders.read(moving.redis, spec.id, moving.first.id, moving.second.id)
        resumed = await moving.resume(spec)
        await anext(resumed)
        before.write_back()
        for _ in range(NUM_RENEWALS):
            await moving.first.requests.recovery.reconcile()
            await moving.second.requests.recovery.catch_up()
        assert moving.redis.hget(keys.task(spec.id, CLIENT), "owner") == moving.second.id.encode()
        await collected(resumed, spec)
        assert (await wait_ended(moving.second, spec.id)).state == "finished"


async def test_answer_of_a_voice_session_stays_at_the_gateway_that_holds_the_session(
    redis_url: str,
) -> None:
    """A gateway waits for Redis, to continue a session, while the client goes on to the next one.
    Once Redis answers, the first one does not take the answer from the second.
    """
    async with two_gateways(redis_url) as moving:
        spec, _ = await moving.begin()
        early = await moving.first.voice.hold("sess_1", 60, "", new=True)
        late = await moving.second.voice.hold("sess_1", 60, "")
        assert early is not None and late is not None
        found = await moving.second.requests.resume(spec.id, VoiceHold("sess_1", late.epoch))
        assert found is not None
        with pytest.raises(ResumedElsewhere):
            await moving.first.requests.resume(spec.id, VoiceHold("sess_1", early.epoch))
        assert_same(await collected(found[1], spec), moving.expected)
        assert (await wait_ended(moving.second, spec.id)).state == "finished"


async def test_answer_is_delivered_although_its_attach_is_lost_and_its_former_gateway_is_dead(
    redis_url: str,
) -> None:
    """Redis loses the attach of the second gateway, and the first gateway is dead: acknowledgements
    at the lost epoch are refused, so the second gateway attaches again and repeats them.
    """
    async with two_gateways(redis_url) as moving:
        spec, _ = await moving.begin()
        before = Holders.read(moving.redis, spec.id, moving.first.id, moving.second.id)
        run(moving.redis, scripts.fence_worker("", moving.first.id, died=True))
        resumed = await moving.resume(spec)
        before.write_back()
        assert_same(await collected(resumed, spec), moving.expected)
        assert (await wait_ended(moving.second, spec.id)).state == "finished"


async def test_rejoined_gateway_keeps_its_listener_although_the_rejoin_is_lost(
    redis_url: str,
) -> None:
    async with two_gateways(redis_url) as moving:
        spec, stream = await moving.begin()
        before = Holders.read(moving.redis, spec.id, moving.first.id)
        former = moving.first.id
        run(moving.redis, scripts.fence_worker("", former, died=True))
        await moving.first._membership.renew(1)  # pyright: ignore[reportPrivateUsage]
        assert moving.first.id != former
        before.write_back()
        received = asyncio.create_task(collected(stream, spec))
        await moving.first._membership.renew(1)  # pyright: ignore[reportPrivateUsage]
        await received
        assert (await wait_ended(moving.first, spec.id)).state == "finished"


async def test_late_refusal_of_a_renewal_replaces_no_newer_id(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway was fenced, and has joined again by the time that it receives the refusal of an
    earlier renewal: it keeps its new id, and with it the answers that it has taken since.
    """
    async with two_gateways(redis_url) as moving:
        spec, stream = await moving.begin()
        client = moving.first
        run(moving.redis, scripts.fence_worker("", client.id, died=True))
        refused, rejoined = asyncio.Event(), asyncio.Event()

        async def answer_late(to: Redis, call: scripts.Call) -> object:
            reply = await run_async(to, call)
            if call.script == "renew" and not refused.is_set():
                refused.set()
                await rejoined.wait()
            return reply

        monkeypatch.setattr(membership, "run_async", answer_late)
        joined = client._membership  # pyright: ignore[reportPrivateUsage]
        late = asyncio.create_task(joined.renew(1))
        await refused.wait()
        await joined.renew(1)
        present = client.id
        rejoined.set()
        await late
        assert client.id == present
        await collected(stream, spec)
        assert (await wait_ended(client, spec.id)).state == "finished"


@pytest.mark.parametrize(
    "delayed", [0, 1], ids=["the first reply is late", "the second reply is late"]
)
async def test_one_of_two_resumptions_at_one_gateway_reads_the_answer_and_the_other_ends(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, delayed: int
) -> None:
    """Of two concurrent resumptions at one gateway, the one whose attach Redis ran last reads the
    answer, even if the replies arrive in the other order; the other one ends.
    """
    async with two_gateways(redis_url) as moving:
        spec, _ = await moving.begin()
        attached, replied = [asyncio.Event(), asyncio.Event()], asyncio.Event()
        numbers = iter(range(2))

        async def in_order(
            client: Redis, call: scripts.Call, *reads: Sequence[str]
        ) -> list[object]:
            number = next(numbers, None)
            if number == 1:
                await attached[0].wait()
            replies = await run_and_read(client, call, *reads)
            if number is not None:
                attached[number].set()
            if number == delayed:
                await replied.wait()
            return replies

        monkeypatch.setattr(requests_module, "run_and_read", in_order)
        tries = [asyncio.create_task(moving.resume(spec)) for _ in range(2)]
        await await_until(
            lambda: asyncio.to_thread(lambda: all(e.is_set() for e in attached)),
            "both to be attached",
        )
        await await_until(
            lambda: asyncio.to_thread(tries[1 - delayed].done), "the reply that is not late"
        )
        replied.set()
        first, second = await asyncio.gather(*tries, return_exceptions=True)
        assert isinstance(second, ClientStream)
        if isinstance(first, ClientStream):
            with pytest.raises(ResumedElsewhere):
                await anext(first)
        else:
            assert isinstance(first, ResumedElsewhere)
        assert_same(await collected(second, spec), moving.expected)


async def delivered_then_lost(moving: Moving) -> tuple[RequestSpec, Callable[[], None]]:
    """Deliver an answer completely. Return its request, and a function that makes Redis lose the
    answer's end and replaces the worker.
    """
    spec, stream = await moving.begin()
    worker = moving.fleet.owner(spec.id, LM)
    holders = [keys.worker_tasks(name) for name in (moving.first.id, worker.worker)]
    of_request = [
        text(key) for key in cast("list[bytes]", moving.redis.keys(f"{keys.request(spec.id)}*"))
    ]
    before = {
        key: cast(bytes, moving.redis.dump(key)) for key in (keys.LIVE, *holders, *of_request)
    }
    await collected(stream, spec)
    assert (await wait_ended(moving.first, spec.id)).state == "finished"

    def lose_end() -> None:
        for key, value in before.items():
            moving.redis.restore(key, 0, value, replace=True)
        moving.fleet.kill(worker)
        moving.fleet.add_worker("lm")

    return spec, lose_end


async def test_delivered_answer_ends_as_finished_although_redis_lost_its_end(
    redis_url: str,
) -> None:
    """A delivered answer whose end Redis lost, and whose worker died, ends as finished: the
    recomputed chunks have no reader, and must not wait for one.
    """
    async with two_gateways(redis_url) as moving:
        spec, lose_end = await delivered_then_lost(moving)
        lose_end()
        for _ in range(2):
            await moving.first.requests.recovery.reconcile()
        assert (await wait_ended(moving.first, spec.id)).state == "finished"


async def test_ended_answer_is_read_once_more_although_redis_lost_its_end(redis_url: str) -> None:
    """An ended answer is read a second time; then Redis loses its end. The second reader, which
    holds no right to an ended answer, becomes its reader once the request runs again.
    """
    async with two_gateways(redis_url) as moving:
        spec, lose_end = await delivered_then_lost(moving)
        stream = await moving.resume(spec)
        lose_end()
        assert_same(await collected(stream, spec), moving.expected)
        assert (await wait_ended(moving.second, spec.id)).state == "finished"


async def test_cancelled_resumption_leaves_no_stream(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumption is cancelled because its client's connection or voice session ends: no stream
    may remain, since no reader would ever end it.
    """
    async with two_gateways(redis_url) as moving:
        spec, stream = await moving.begin()
        monkeypatch.setattr(ClientStream, "read_from_start", lambda _: asyncio.Event().wait())
        resumed = asyncio.create_task(moving.resume(spec))
        await await_until(
            lambda: asyncio.to_thread(lambda: moving.second.requests.num_held == 1),
            "the stream to be held",
        )
        resumed.cancel()
        await asyncio.wait([resumed])
        assert resumed.cancelled() and moving.second.requests.num_held == 0
        monkeypatch.undo()
        stream = await moving.resume(spec)
        await collected(stream, spec)


async def test_cancelled_submission_leaves_no_stream(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways(redis_url) as moving:
        requests = moving.first.requests
        monkeypatch.setattr(requests, "_replicate", lambda *_: asyncio.Event().wait())
        submitted = asyncio.create_task(requests.submit(fake_spec(moving.fleet), None))
        await await_until(
            lambda: asyncio.to_thread(lambda: requests.num_held == 1), "the stream to be held"
        )
        submitted.cancel()
        await asyncio.wait([submitted])
        assert submitted.cancelled() and requests.num_held == 0


NUM_HELD, MANY_HELD = 3, 250
SHORT_LEASE, LONG_LEASE = "lease.worker_ttl_s=0.5", "lease.worker_ttl_s=3600"
Send = Callable[[], Awaitable[object]]


async def begin(client: FleetClient, fleet: ThreadFleet) -> list[tuple[RequestSpec, ClientStream]]:
    """Submit `NUM_HELD` requests whose answers are not read, so that their workers wait for
    credit.
    """
    held: list[tuple[RequestSpec, ClientStream]] = []
    for _ in range(NUM_HELD):
        spec = fake_spec(fleet)
        held.append((spec, await client.requests.submit(spec, None)))
    return held


def fence(fleet: ThreadFleet, client: FleetClient) -> None:
    run(fleet.clients[0], scripts.fence_worker("", client.id, died=True))


def intercept_attach(request: RequestId, once: Callable[[Send], Awaitable[object]]) -> object:
    """Return a replacement for `run_async` that runs the first attach of `request` through
    `once`.
    """
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

    async with open_fleet(redis_url, SHORT_LEASE, "lease.gateway_timeout_s=2", *IN_STEP) as (
        fleet,
        client,
    ):
        expected = await answer(client, fake_spec(fleet))
        held = await begin(client, fleet)
        monkeypatch.setattr(
            stream_recovery, "run_async", intercept_attach(held[1][0].id, lose_connection)
        )
        fence(fleet, client)
        for received in await asyncio.gather(*(collected(stream, spec) for spec, stream in held)):
            assert_same(received, expected)


async def test_cancelled_caller_does_not_interrupt_the_rejoin(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller that noticed the gateway's fencing is cancelled during the rejoin: without another
    lease renewal, every answer is resumed.
    """
    async with open_fleet(redis_url, LONG_LEASE, "lease.gateway_timeout_s=2", *IN_STEP) as (
        fleet,
        client,
    ):
        expected = await answer(client, fake_spec(fleet))
        held = await begin(client, fleet)
        other = fake_spec(fleet)

        async def cancel_caller(send: Send) -> object:
            left = asyncio.Event()
            cancelled_submit.add_done_callback(lambda _: left.set())
            cancelled_submit.cancel()
            await left.wait()
            return await send()

        monkeypatch.setattr(
            stream_recovery, "run_async", intercept_attach(held[1][0].id, cancel_caller)
        )
        fence(fleet, client)
        cancelled_submit = asyncio.create_task(client.requests.submit(other, None))
        with pytest.raises(asyncio.CancelledError):
            await cancelled_submit
        for received in await asyncio.gather(*(collected(stream, spec) for spec, stream in held)):
            assert_same(received, expected)


@pytest.fixture
async def holder(redis_url: str, client: redis.Redis) -> AsyncIterator[FleetClient]:
    """A gateway that holds `MANY_HELD` requests, in a fleet whose workers do nothing."""
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
    assert client.smembers(keys.worker_tasks(holder.id)) == {
        *held,
        f"{other.request_id}|{CLIENT}".encode(),
    }
    assert commands_run(client)["evalsha"] < MANY_HELD / 10
