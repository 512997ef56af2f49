"""Split stages under overload: prompts wait until the decode role has room for them, and what the
prefill role has computed is used.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.core.errors import FleetError, TransferError
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec
from fleet.transfer.base import WireTensor
from fleet.worker.loop.loop import WorkerLoop
from tests.control_plane import Control
from tests.harness import (
    EdgeArrays,
    ThreadFleet,
    answer,
    assert_same,
    fake_spec,
    open_fleet,
    stop_claims,
)
from tests.support import await_until, wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

STAGE = StageName("lm")
PREFILL, DECODE = RoleName("lm.prefill"), RoleName("lm.decode")
SLOTS, NUM_REQUESTS, NUM_TOKENS = 2, 40, 5
SPLIT = (
    "graph=text",
    f"stages.lm.split={{prefill: {{max_batch: 16}}, decode: {{max_batch: {SLOTS}}}}}",
)


def loop_of(fleet: ThreadFleet, role: RoleName) -> WorkerLoop:
    return next(
        loop for loop in fleet.loops if loop.role == role and loop.worker not in fleet.killed
    )


def specs_of(fleet: ThreadFleet, count: int = NUM_REQUESTS) -> list[RequestSpec]:
    return [fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in range(count)]


async def answers_to(client: FleetClient, specs: Sequence[RequestSpec]) -> list[EdgeArrays]:
    return await asyncio.gather(*(answer(client, spec) for spec in specs))


def num_waiting(client: redis.Redis, role: RoleName) -> int:
    return sum(client.xlen(stream) for stream in keys.role_streams(role))


def wait_two_polls(loop: WorkerLoop) -> None:
    """Wait until the worker has had time to do whatever it would do without further news."""
    for _ in range(2):
        last = loop.maintenance.next_poll_s
        wait_until(lambda last=last: loop.maintenance.next_poll_s != last, "a poll of the worker")


async def ends_of_offers(client: FleetClient, specs: Sequence[RequestSpec]) -> Counter[str]:
    """Count the hand-offs of the requests, and how their offers ended."""
    traces = [await client.telemetry.trace(spec.id) for spec in specs]
    events = [event for trace in traces if trace is not None for event in trace.events]
    counted = ("handed_off", "confirmed", "released")
    return Counter(event.what for event in events if event.what in counted)


async def test_prompts_wait_until_decode_has_room_and_every_offer_is_used(redis_url: str) -> None:
    """While the decode role's slots are full, the prefill role computes as many prompts as the
    decode role has slots, and no more; offers stand however long they wait.
    """
    async with open_fleet(redis_url, *SPLIT) as (fleet, client):
        expected = await answers_to(client, specs_of(fleet))
        source, target = loop_of(fleet, PREFILL), loop_of(fleet, DECODE)
        await asyncio.to_thread(stop_claims, target)
        specs = specs_of(fleet)
        answers = [asyncio.create_task(answer(client, spec)) for spec in specs]
        store = fleet.clients[0]
        in_flight = 2 * SLOTS

        def waits() -> tuple[int, int]:
            return num_waiting(store, PREFILL), num_waiting(store, DECODE)

        async def is_full() -> bool:
            return sum(waits()) == NUM_REQUESTS and waits()[1] >= in_flight

        await await_until(is_full, "as many prompts to be computed as may wait")
        await asyncio.to_thread(wait_two_polls, source)
        assert waits() == (NUM_REQUESTS - in_flight, in_flight)
        target.availability.draining = False
        for received, whole in zip(await asyncio.gather(*answers), expected, strict=True):
            assert_same(received, whole)
        ends = await ends_of_offers(client, specs)
    assert ends == {"handed_off": NUM_REQUESTS, "confirmed": NUM_REQUESTS}


@pytest.mark.parametrize("setting", ["transition_source=conductor", "numerics=fast"])
async def test_overloaded_pipeline_of_split_stages_uses_every_offer(
    redis_url: str, setting: str
) -> None:
    splits = [
        f"stages.{stage}.split={{prefill: {{max_batch: 8}}, decode: {{max_batch: {SLOTS}}}}}"
        for stage in ("thinker", "talker")
    ]
    count = 6 * SLOTS
    async with open_fleet(redis_url, setting, *splits) as (fleet, client):
        expected = [await answer(client, spec) for spec in specs_of(fleet, count)]
        specs = specs_of(fleet, count)
        received = await answers_to(client, specs)
        for got, whole in zip(received, expected, strict=True):
            assert_same(got, whole)
        ends = await ends_of_offers(client, specs)
    assert ends == {"handed_off": 2 * count, "confirmed": 2 * count}


async def test_deaths_of_both_halves_under_overload_block_nothing(redis_url: str) -> None:
    """Of two workers of each half one dies while offers wait: every request is answered as without
    deaths, and no more tasks are left anywhere.
    """
    async with open_fleet(redis_url, *SPLIT) as (fleet, client):
        expected = await answers_to(client, specs_of(fleet))
        for role in (PREFILL, DECODE):
            fleet.add_worker(role)
        specs = specs_of(fleet)
        answers = [asyncio.create_task(answer(client, spec)) for spec in specs]

        async def offers_wait() -> bool:
            return num_waiting(fleet.clients[0], DECODE) > 0

        for role in (PREFILL, DECODE):
            await await_until(offers_wait, "offers to wait")
            fleet.kill(loop_of(fleet, role))
        for received, whole in zip(await asyncio.gather(*answers), expected, strict=True):
            assert_same(received, whole)
        assert [num_waiting(fleet.clients[0], role) for role in (PREFILL, DECODE)] == [0, 0]


async def test_requests_of_a_deserted_decode_role_fail_with_its_name(redis_url: str) -> None:
    """Prompts that wait for room in a decode role without workers fail as the tasks do that the
    decode role has already.
    """
    soon = ("lease.no_worker_timeout_s=1", "lease.claim_timeout_s=0.2")
    async with open_fleet(redis_url, *SPLIT, *soon) as (fleet, client):
        await asyncio.to_thread(stop_claims, loop_of(fleet, DECODE))
        streams = [await client.requests.submit(spec, None) for spec in specs_of(fleet)]
        fleet.kill(loop_of(fleet, DECODE), died=False)

        async def failure(number: int) -> str:
            with pytest.raises(FleetError) as failed:
                async for _ in streams[number]:
                    pass
            return failed.value.message

        async with asyncio.timeout(30):
            messages = await asyncio.gather(*map(failure, range(NUM_REQUESTS)))
    assert {DECODE in message for message in messages} == {True}, set(messages)


async def test_prefill_worker_whose_pages_are_all_offered_claims_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fleet(redis_url, *SPLIT) as (fleet, client):
        source = loop_of(fleet, PREFILL)
        with monkeypatch.context() as full:
            full.setattr(source.parts.offers, "has_room", lambda: False)
            await asyncio.to_thread(wait_two_polls, source)
            asked = asyncio.create_task(answer(client, fake_spec(fleet)))

            async def waits() -> bool:
                return num_waiting(fleet.clients[0], PREFILL) == 1

            await await_until(waits, "the prompt to be queued")
            await asyncio.to_thread(wait_two_polls, source)
            assert await waits()
        assert await asked


async def test_hand_off_waits_for_room_in_the_arena(redis_url: str) -> None:
    """A copy for which the arena has no room waits until another copy was imported, and is not
    computed again.
    """
    async with open_fleet(redis_url, *SPLIT, without=PREFILL) as (fleet, client):
        source, target = fleet.add_worker(PREFILL), loop_of(fleet, DECODE)
        publish, most = source.transfer.publish, 0

        def publish_one(
            request: RequestId, dtype: str, shape: tuple[int, ...], data: bytes | memoryview
        ) -> WireTensor:
            nonlocal most
            num_open = source.parts.offers.num_copies()
            if request.endswith("/kv") and num_open:
                raise TransferError("no room for another copy")
            most = max(most, num_open + 1)
            return publish(request, dtype, shape, data)

        source.transfer.publish = publish_one
        await asyncio.to_thread(stop_claims, target)
        specs = specs_of(fleet, 2 * SLOTS)
        answers = [asyncio.create_task(answer(client, spec)) for spec in specs]

        async def is_offered() -> bool:
            return num_waiting(fleet.clients[0], DECODE) > 0

        await await_until(is_offered, "an offer")
        await asyncio.to_thread(wait_two_polls, source)
        assert num_waiting(fleet.clients[0], DECODE) == most == 1
        target.availability.draining = False
        await asyncio.gather(*answers)
        assert await ends_of_offers(client, specs) == {
            "handed_off": 2 * SLOTS,
            "confirmed": 2 * SLOTS,
        }


@pytest.mark.parametrize("num_workers", [1, 3])
def test_room_of_the_next_role_is_counted_over_all_workers(
    client: redis.Redis, num_workers: int
) -> None:
    """However many prefill workers read at a time, their tasks, and those that wait and run in the
    decode role, are together at most twice the slots of the decode role.
    """
    control = Control(client)
    control.lead()
    sources = [WorkerId(f"{PREFILL}@test:{number}:a") for number in range(num_workers)]
    for source in sources:
        control.register(source, PREFILL, capacity="16", next_role=DECODE, no_worker_us="1000000")
    targets = [WorkerId(f"{DECODE}@test:{number}:a") for number in (8, 9)]
    for target in targets:
        control.register(target, DECODE, capacity=str(SLOTS))
    control.register(WorkerId("gateway@test:1:a"), "")
    for number in range(NUM_REQUESTS):
        submit = scripts.submit(
            RequestSpec(
                id=RequestId(f"req-{number:02}"), graph="text", prompt_ids=(1,), outputs=()
            ),
            None,
            bound=NUM_REQUESTS,
            stages=[STAGE],
            edges=[],
            gateway=WorkerId("gateway@test:1:a"),
            first_roles=[PREFILL],
        )
        assert control.run(submit) == "ok"

    def read() -> int:
        return sum(len(control.read(source, 9, PREFILL)) for source in sources)

    assert [read(), read()] == [4 * SLOTS, 0]
    control.kill(targets[0])
    assert read() == 0
    control.register(WorkerId(f"{DECODE}@test:7:a"), DECODE, capacity=str(2 * SLOTS))
    assert read() == 2 * SLOTS
