"""Requests beyond the limit wait at their gateways, and are admitted in the fair order of their
clients. The test ends requests itself, one at a time, and counts who is admitted.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import redis

from fleet.config import load_config
from fleet.control import keys, retry_times, scripts, waiting
from fleet.control.client import FleetClient
from fleet.control.connect import first_text, run, text
from fleet.control.waiting import Applicant, ClientShare
from fleet.core.errors import Aborted, FleetError, GatewayStopping, Overloaded
from fleet.core.ids import Epoch, RequestId, new_request_id
from fleet.core.request import RequestSpec
from tests.control_plane import ROLE, STAGE, TEXT, WORKER, Control, join, num_commands, submission
from tests.harness import gateway_at
from tests.support import await_until, stream_entries

pytestmark = pytest.mark.one_file_in(3, "control in a process")

BOUND = 4
MIB = 1024 * 1024
MANY, FEW = ClientShare("10.0.0.1"), ClientShare("10.0.0.2")

Submission = asyncio.Task[RequestId]


@dataclass(slots=True)
class WaitingLine:
    """A fleet without workers, whose requests end when the test says so. `admitted`: the client of
    each admitted request, in order.
    """

    redis: redis.Redis
    gateways: list[FleetClient]
    admitted: list[str] = field(default_factory=list[str])
    live: list[RequestId] = field(default_factory=list[RequestId])
    submissions: list[Submission] = field(default_factory=list[Submission])

    def submit(
        self,
        client: ClientShare,
        gateway: int = 0,
        num_bytes: int = 0,
        num: int = 1,
        began_s: float | None = None,
    ) -> list[Submission]:
        """Begin to submit `num` requests of a client. `began_s`: time from which their wait is
        measured, if it is not the present.
        """
        begun: list[Submission] = []
        for _ in range(num):
            applicant = Applicant(client, num_bytes)
            applicant.began_s = began_s or applicant.began_s
            begun.append(asyncio.create_task(self._submit(applicant, gateway)))
        self.submissions += begun
        return begun

    async def _submit(self, applicant: Applicant, gateway: int) -> RequestId:
        spec = RequestSpec(id=new_request_id(), graph="text", prompt_ids=(1,), outputs=(TEXT,))
        await self.gateways[gateway].requests.submit(spec, None, applicant)
        self.admitted.append(applicant.client.name)
        self.live.append(spec.id)
        return spec.id

    async def waits(self, num: int) -> None:
        """Wait until Redis knows of `num` waiting requests, over all gateways."""

        async def known() -> bool:
            return int(text(self.redis.hget(keys.WAITING_NUMBERS, "*")) or 0) == num

        await await_until(known, f"{num} requests to wait")

    async def end(self, num: int = 1) -> None:
        """End the requests that have been live for longest, one at a time, each when the place of
        the one before is taken, if a request waits for it.
        """
        for _ in range(num):
            num_admitted = len(self.admitted)
            is_waited_for = any(gateway.requests.num_waiting for gateway in self.gateways)
            await self.gateways[0].requests.abort(self.live.pop(0))
            if is_waited_for:

                async def taken(after: int = num_admitted) -> bool:
                    return len(self.admitted) > after

                await await_until(taken, "the free place to be taken")

    def left(self) -> set[str]:
        """Return the keys about waiting requests and live clients that exist."""
        found = [*self.redis.scan_iter(match=keys.PREFIX + "waiting*")]
        return {text(key) for key in [*found, *self.redis.scan_iter(match=keys.LIVE_CLIENTS)]}


OpenLine = Callable[..., Awaitable[WaitingLine]]


@pytest.fixture
async def open_line(redis_url: str, client: redis.Redis) -> AsyncIterator[OpenLine]:
    """Function that opens a queue over `num_gateways` gateways with the given settings. Afterwards
    everything ends, and no key must be left.
    """
    opened: list[WaitingLine] = []
    async with AsyncExitStack() as gateways:

        async def open_with(*settings: str, num_gateways: int = 1) -> WaitingLine:
            given = (f"limits.max_requests={BOUND}", "limits.max_wait_s=60", *settings)
            config = load_config(None, ("engine=fake", "device=cpu", "graph=text", *given))
            assert join(client, WORKER) == ["ok"]
            clients = [
                await gateways.enter_async_context(gateway_at(redis_url, config))
                for _ in range(num_gateways)
            ]
            for gateway in clients:
                await gateway.open_connections()
            opened.append(WaitingLine(client, clients))
            return opened[-1]

        yield open_with
        for queue in opened:
            await _end_all(queue)


async def _end_all(queue: WaitingLine) -> None:
    for begun in queue.submissions:
        begun.cancel()
    await asyncio.gather(*queue.submissions, return_exceptions=True)
    for request in queue.redis.smembers(keys.LIVE):
        Control(queue.redis).abort(RequestId(text(request)))

    async def gone() -> bool:
        return not queue.left()

    await await_until(gone, "every key about waiting requests to be deleted")


async def test_clients_with_one_request_each_go_before_one_with_hundreds(
    open_line: OpenLine,
) -> None:
    """Each of twenty clients is served as if the one beside them had no more than they have."""
    queue = await open_line()
    queue.submit(MANY, num=200)
    await queue.waits(200 - BOUND)
    for number in range(20):
        queue.submit(ClientShare(f"10.0.1.{number}"))
    await queue.waits(220 - BOUND)
    await queue.end(22)
    assert Counter(queue.admitted[BOUND:])[MANY.name] <= 2, "a turn as every other client has"


async def test_order_is_fair_over_gateways(open_line: OpenLine) -> None:
    queue = await open_line(num_gateways=2)
    queue.submit(MANY, num=50)
    await queue.waits(50 - BOUND)
    few = [ClientShare(f"10.0.1.{number}") for number in range(6)]
    for client in few:
        queue.submit(client, gateway=1)
    await queue.waits(56 - BOUND)
    await queue.end(8)
    turns = Counter(queue.admitted[BOUND:])
    assert turns[MANY.name] <= 2 and set(turns) == {MANY.name, *(client.name for client in few)}


async def test_live_requests_follow_the_weights_of_their_clients(open_line: OpenLine) -> None:
    """With 2 to 1, the one has twice the places of the other, however long answers take."""
    queue = await open_line("limits.max_requests=6")
    heavy = ClientShare("10.0.0.9", 2.0)
    queue.submit(FEW, num=60)
    await queue.waits(54)
    queue.submit(heavy, num=60)
    await queue.waits(114)
    await queue.end(30)
    assert Counter(queue.admitted[-6:]) == {heavy.name: 4, FEW.name: 2}


async def test_clients_of_equal_shares_take_turns(open_line: OpenLine) -> None:
    """The order among equal clients is not that of their names: none of them starves."""
    queue = await open_line("limits.max_requests=1")
    clients = [ClientShare(name) for name in ("z", "a", "m")]
    for client in clients:
        queue.submit(client, num=10)
    await queue.waits(29)
    await queue.end(15)
    turns = queue.admitted[1:]
    assert all(len(set(turns[at : at + 3])) == 3 for at in range(0, 15, 3)), turns


async def test_request_is_admitted_at_once_where_there_is_room(open_line: OpenLine) -> None:
    queue = await open_line(num_gateways=2)
    await asyncio.gather(*queue.submit(MANY, num=BOUND - 1))
    await asyncio.gather(*queue.submit(MANY, gateway=1))
    assert queue.gateways[0].requests.num_waiting == 0


async def test_empty_queue_costs_no_call(
    open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await open_line()
    monkeypatch.setattr(waiting, "run_async", _unexpected)
    monkeypatch.setattr(retry_times, "run_async", _unexpected)
    await asyncio.gather(*queue.submit(MANY, num=BOUND))
    assert queue.left() == {keys.LIVE_CLIENTS}
    await queue.end(BOUND)
    assert queue.left() == set()


async def _unexpected(*_: object) -> None:
    raise AssertionError("a call about the queue, though no request waits")


def test_submission_costs_the_same_beside_many_clients(client: redis.Redis) -> None:
    control, numbers = Control(client).begin(), list[int]()
    for number in range(100):
        call = submission(f"req-of-{number}", bound=1000, client=f"client-{number}", waits="soon")
        numbers.append(num_commands(client, call, "ok"))
    assert numbers[0] == numbers[-1] and client.hlen(keys.LIVE_CLIENTS) == 101
    for number in range(100):
        assert control.abort(RequestId(f"req-of-{number}")) == "ok"
    assert client.hlen(keys.LIVE_CLIENTS) == 1


def _spec() -> RequestSpec:
    return RequestSpec(id=new_request_id(), graph="text", prompt_ids=(1,), outputs=(TEXT,))


async def test_new_request_does_not_overtake_waiting_ones(open_line: OpenLine) -> None:
    """A place that becomes free belongs to the requests that wait, before their gateway knows of
    it.
    """
    queue = await open_line(num_gateways=2)
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    queue.submit(FEW, gateway=1)
    await queue.waits(1)
    queue.redis.srem(keys.LIVE, queue.live[0])  # nobody is woken
    queue.submit(MANY)
    await await_admitted(queue, BOUND + 1)
    assert queue.admitted[-1] == FEW.name
    queue.redis.sadd(keys.LIVE, queue.live[0])


async def test_request_whose_time_is_over_does_not_overtake_waiting_ones(
    open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with many requests has one whose time is over at any moment: it may not take the
    place that another client waits for.
    """
    queue = await open_line(num_gateways=2)
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    monkeypatch.setattr(waiting, "POLL_S", 1.0)  # so that the late one comes first
    queue.submit(FEW, gateway=1)
    await queue.waits(1)
    queue.redis.srem(keys.LIVE, queue.live[0])  # nobody is woken
    late = queue.submit(MANY, began_s=time.monotonic() - 100)[0]
    assert (await refusal_of(late)).retry_after_s >= 1
    await await_admitted(queue, BOUND + 1)
    assert queue.admitted[-1] == FEW.name
    queue.redis.sadd(keys.LIVE, queue.live[0])


async def await_admitted(queue: WaitingLine, num: int) -> None:
    async def admitted() -> bool:
        return len(queue.admitted) >= num

    await await_until(admitted, f"{num} requests to be admitted")


async def test_client_that_leaves_while_it_waits_leaves_the_queue(open_line: OpenLine) -> None:
    queue = await open_line()
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    few = queue.submit(FEW, num=3)
    await queue.waits(3)
    few[0].cancel()
    await queue.waits(2)
    assert queue.gateways[0].requests.num_waiting == 2
    await queue.end(2)
    assert queue.admitted.count(FEW.name) == 2 and few[0].cancelled()


async def test_withdrawn_request_is_not_submitted(open_line: OpenLine) -> None:
    queue = await open_line()
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    applicant = Applicant(FEW)
    submitting = asyncio.create_task(queue.gateways[0].requests.submit(_spec(), None, applicant))
    await queue.waits(1)
    applicant.withdraw()
    with pytest.raises(Aborted):
        await submitting


async def refusal_of(submission: Submission) -> Overloaded:
    with pytest.raises(Overloaded) as refused:
        await submission
    return refused.value


async def test_full_queue_refuses_the_client_with_the_most(open_line: OpenLine) -> None:
    """No client can fill the queue: beyond its bound the newest request of the client with the most
    gives way to a client with fewer.
    """
    queue = await open_line("limits.max_waiting=10")
    many = queue.submit(MANY, num=BOUND + 10)
    await queue.waits(10)
    assert "running or waiting" in (await refusal_of(queue.submit(MANY)[0])).message
    few = queue.submit(FEW)
    assert (await refusal_of(many[-1])).retry_after_s >= 1
    await queue.waits(10)
    assert not few[0].done()
    await queue.end()
    assert queue.admitted[-1] == FEW.name


async def test_queue_is_bounded_in_memory(open_line: OpenLine) -> None:
    queue = await open_line("limits.max_waiting_mib=2")
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    held = queue.submit(MANY, num_bytes=MIB, num=2)
    await queue.waits(2)
    assert (await refusal_of(queue.submit(MANY, num_bytes=MIB)[0])).retry_after_s >= 1
    assert (await refusal_of(queue.submit(FEW, num_bytes=3 * MIB)[0])).retry_after_s >= 1
    queue.submit(FEW, num_bytes=MIB // 2)
    await refusal_of(held[-1])
    await queue.waits(2)


async def test_request_is_refused_at_once_without_a_wait(open_line: OpenLine) -> None:
    queue = await open_line("limits.max_wait_s=0")
    first = queue.submit(MANY, num=BOUND + 3)
    done = await asyncio.gather(*first, return_exceptions=True)
    refused = [error for error in done if isinstance(error, FleetError)]
    assert len(refused) == 3 and all(isinstance(error, Overloaded) for error in refused)
    assert not queue.left() - {keys.LIVE_CLIENTS}


async def test_wait_ends_after_its_time_with_a_time_to_retry(open_line: OpenLine) -> None:
    queue = await open_line("limits.max_wait_s=0.2")
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    refused = await refusal_of(queue.submit(FEW)[0])
    assert f"try again in {refused.retry_after_s} s" in refused.message
    assert queue.gateways[0].requests.num_waiting == 0
    lines = [text(fields[b"m"]) for _, fields in stream_entries(queue.redis, keys.LOGS)]
    assert sum("is refused" in line for line in lines) <= 1


@pytest.mark.parametrize(("ended_per_s", "longest_s"), [(10, 10), (1, 60)])
async def test_refused_requests_are_told_to_return_one_after_the_other(
    open_line: OpenLine, ended_per_s: int, longest_s: int
) -> None:
    """The time to retry follows from the recent rate of ends and the number of requests before."""
    queue = await open_line("limits.max_wait_s=0")
    seconds, _ = queue.redis.time()
    step = seconds // 5 - 1
    queue.redis.hset(keys.series(step), "ended:finished", 5 * ended_per_s)
    queue.redis.expire(keys.series(step), 60)
    first = queue.submit(MANY, num=BOUND + 80)
    done = await asyncio.gather(*first, return_exceptions=True)
    times = sorted(error.retry_after_s for error in done if isinstance(error, Overloaded))
    assert len(times) == 80 and times[0] <= 2
    assert longest_s * 0.7 <= times[-1] <= longest_s
    if longest_s < 60:
        assert max(Counter(times).values()) <= 3 * ended_per_s, "not all at the same time"


async def test_gateway_that_falls_silent_holds_up_nobody(open_line: OpenLine) -> None:
    """The clients of a gateway that was killed are forgotten, and their turns with them."""
    queue = await open_line()
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    names = [f"lost-{number}" for number in range(BOUND)]
    seconds, _ = queue.redis.time()
    queue.redis.zadd(keys.WAITING_GATEWAYS, {"gateway@lost:1:a": (seconds - 3) * 1_000_000})
    for name in (*names, "*"):
        num = len(names) if name == "*" else 1
        queue.redis.hset(keys.WAITING_NUMBERS, name, num)
    queue.redis.hset(keys.PREFIX + "waiting:at:gateway@lost:1:a", mapping=dict.fromkeys(names, 1))
    queue.redis.zadd(keys.WAITING, dict.fromkeys(names, 0))
    queue.submit(FEW)
    await queue.waits(1)
    await queue.end()
    assert queue.admitted[-1] == FEW.name


async def test_waiting_requests_are_refused_when_their_gateway_stops(
    open_line: OpenLine,
) -> None:
    queue = await open_line(num_gateways=2)
    queue.submit(MANY, num=BOUND, gateway=1)
    await await_admitted(queue, BOUND)
    few = queue.submit(FEW, num=2)
    await queue.waits(2)
    queue.gateways[0].requests.detach_all()
    done: Sequence[object] = await asyncio.gather(*few, return_exceptions=True)
    assert all(isinstance(error, GatewayStopping) for error in done)
    await queue.waits(0)


async def test_audio_request_waits_before_it_is_prepared(open_line: OpenLine) -> None:
    queue = await open_line()
    queue.submit(MANY, num=BOUND)
    await await_admitted(queue, BOUND)
    requests, spec = queue.gateways[0].requests, _spec()
    checked = asyncio.create_task(requests.check_admission(spec.id, (TEXT,), Applicant(FEW)))
    await queue.waits(1)
    await queue.gateways[0].requests.abort(queue.live.pop(0))
    assert await checked == 1
    await queue.waits(0)


async def test_requests_beyond_those_prepared_are_not_woken(open_line: OpenLine) -> None:
    """A place for which a request is being prepared wakes no other one, again and again."""
    queue = await open_line()
    requests = queue.gateways[0].requests
    requests.count_preparing(BOUND)
    applicant = Applicant(FEW)
    turn = asyncio.create_task(requests.wait_for_turn(_spec().id, applicant, "prepared"))
    await queue.waits(1)
    assert not turn.done()
    requests.count_preparing(-1)
    await turn
    assert await requests.check_admission(_spec().id, (TEXT,), applicant) == BOUND


UNCLAIMED = 16
"""Tasks that may wait for the workers of a role before further requests wait at gateways."""


def claim_first(queue: WaitingLine) -> None:
    """Claim the task that has been granted for longest, in the role of a worker."""
    entry, fields = stream_entries(queue.redis, keys.role(ROLE))[0]
    request, epoch = RequestId(text(fields[b"r"])), Epoch(int(fields[b"e"]))
    call = scripts.claim(WORKER, ROLE, text(entry), request, STAGE, epoch)
    assert first_text(run(queue.redis, call)) == "ok"


async def test_order_is_fair_below_the_limit_too(open_line: OpenLine) -> None:
    """Tasks are claimed in the order of their grants, so a client's hundreds may not be granted
    before the one request of another, although all of them could be live.
    """
    queue = await open_line("limits.max_requests=1000")
    queue.submit(MANY, num=200)
    await queue.waits(200 - UNCLAIMED)
    queue.submit(FEW)
    await queue.waits(201 - UNCLAIMED)
    claim_first(queue)
    await await_admitted(queue, UNCLAIMED + 1)
    assert queue.admitted[-1] == FEW.name


@pytest.mark.parametrize("bounds", ["limits.max_wait_s=0.2", "limits.max_waiting=20"])
async def test_request_is_never_refused_while_a_place_is_free(
    open_line: OpenLine, bounds: str
) -> None:
    """A request whose time is over, or for which the queue has no room, takes any place."""
    queue = await open_line("limits.max_requests=50", bounds)
    num_waiting = 20 if "waiting" in bounds else 0
    submissions = queue.submit(MANY, num=50)

    async def settled() -> bool:
        return sum(each.done() for each in submissions) == 50 - num_waiting

    await await_until(settled, "every other request to be admitted")
    assert [each.exception() for each in submissions if each.done() and each.exception()] == []
