"""A reader who is slower than the stages of an answer holds none of their slots: tasks without
credit park, and continue from their logs once they have credit.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run, texts
from fleet.control.stream import ClientStream
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import DEFAULT_GRAPH, get_graph
from fleet.telemetry.trace import RequestTrace
from tests.control_plane import OTHER, REQUEST, ROLE, STAGE, TEXT, WORKER, Control
from tests.harness import (
    ThreadFleet,
    answer,
    assert_same,
    collected,
    fake_spec,
    held,
    open_fleet,
    wait_ended,
    wait_none_live,
)
from tests.support import await_until, wait_until

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

STAGES = [stage.name for stage in get_graph(DEFAULT_GRAPH).stages]
SLOTS, NUM_SLOW, NUM_TOKENS = 2, 5, 160
SMALL_CREDITS = (
    "edges.text.credits=8",
    "edges.thought.credits=8",
    "edges.codes.credits=2",
    "edges.audio.credits=4",
)
FEW_SLOTS = (*(f"stages.{stage}.max_batch={SLOTS}" for stage in STAGES), *SMALL_CREDITS)
SOON = "lease.park_after_s=0.1"
BYTES_PER_FRAME = 1920 * 2


# Scripts


def wait_for(enough: int) -> list[scripts.CreditWait]:
    return [scripts.CreditWait(TEXT, CLIENT, enough)]


def park(control: Control, epoch: Epoch, enough: int = 2) -> list[str]:
    return texts(run(control.client, scripts.park(REQUEST, STAGE, epoch, wait_for(enough))))


def owned_with_chunks(control: Control, count: int = 3) -> Epoch:
    control.register(OTHER, capacity="4")
    control.client.hset(keys.worker(WORKER), "capacity", "4")
    epoch = control.own()
    assert [control.append(epoch, index) for index in range(count)] == ["ok"] * count
    return epoch


def test_parked_task_has_no_owner_and_counts_no_death(control: Control) -> None:
    epoch = owned_with_chunks(control)
    assert park(control, epoch) == ["parked"]
    task = control.task()
    assert (task["state"], task["owner"]) == ("parked", "") and "deaths" not in task
    assert not control.tasks_of() and not control.grants()
    assert control.append(epoch, 3) == "stale", "its former owner may write no more"
    control.kill(WORKER)
    assert control.task()["state"] == "parked", "the death of the former owner changes nothing"


def test_credit_grants_a_parked_task_to_its_former_worker(control: Control) -> None:
    epoch = owned_with_chunks(control)
    park(control, epoch)
    assert control.acknowledge(1) == "ok" and control.task()["state"] == "parked"
    assert control.acknowledge(2) == "ok"
    task = control.task()
    assert (task["state"], task["reserved_for"]) == ("granted", WORKER)
    assert int(task["epoch"]) > epoch and not {"waits", "parked_by"} & task.keys()
    assert control.claim(Epoch(int(task["epoch"]))) == "ok"
    assert control.append(Epoch(int(task["epoch"])), 3) == "ok", "its count continues"


def test_credit_grants_a_parked_task_to_its_role_if_its_worker_has_no_room(
    control: Control,
) -> None:
    park(control, owned_with_chunks(control))
    control.client.hset(keys.worker(WORKER), "capacity", "0")
    control.acknowledge(3)
    assert [stage for stage, *_ in control.grants()] == [STAGE]


def close_edge(control: Control) -> None:
    """Close the client's edge as the client."""
    ack = scripts.Ack(
        request=REQUEST,
        stage=CLIENT,
        epoch=control.epoch(CLIENT),
        edge=TEXT,
        consumed=0,
        producer=STAGE,
        closed=True,
    )
    assert control.run(scripts.ack([ack])) == "ok"


@pytest.mark.parametrize("how", ["acknowledged", "closed", "finished"])
def test_task_whose_credit_arrived_meanwhile_does_not_park(control: Control, how: str) -> None:
    epoch = owned_with_chunks(control)
    if how == "acknowledged":
        control.acknowledge(2)
    elif how == "closed":
        close_edge(control)
    else:
        control.acknowledge(0, delivered=True)
    answer, consumed = park(control, epoch)
    assert answer == "credit" and int(consumed) >= 2
    assert control.task()["owner"] == WORKER


def test_consumer_that_closes_its_edge_continues_a_parked_task(control: Control) -> None:
    park(control, owned_with_chunks(control))
    close_edge(control)
    assert control.task()["state"] == "granted"


def test_stale_owner_parks_nothing(control: Control) -> None:
    epoch = owned_with_chunks(control)
    control.kill(WORKER)
    later = control.epoch()
    assert control.claim(later, OTHER) == "ok"
    assert park(control, epoch) == ["stale"] and control.task()["owner"] == OTHER
    assert park(control, later) == ["parked"]
    assert park(control, later) == ["stale"], "it is parked already"
    control.abort()
    assert park(control, control.epoch()) == ["ended"]


def test_task_parks_until_each_of_its_edges_has_credit(control: Control) -> None:
    epoch = owned_with_chunks(control)
    waits = [*wait_for(2), scripts.CreditWait(EdgeName("other"), CLIENT, 1)]
    assert texts(run(control.client, scripts.park(REQUEST, STAGE, epoch, waits))) == ["parked"]
    control.acknowledge(2)
    assert control.task()["state"] == "parked"
    control.client.hset(keys.task(REQUEST, CLIENT), "consumed:other", 1)
    control.acknowledge(3)
    assert control.task()["state"] == "granted"


def test_parked_task_whose_tensors_are_lost_is_granted_to_publish_them_again(
    control: Control,
) -> None:
    park(control, owned_with_chunks(control))
    assert control.lose_tensors() == "ok"
    assert control.task()["state"] == "granted"


def test_abort_of_a_parked_request_leaves_no_right(control: Control) -> None:
    park(control, owned_with_chunks(control))
    assert control.abort() == "ok"
    assert control.task()["state"] == "aborted" and not control.grants(ROLE)
    assert any(fields[b"k"] == b"x" for fields in control.inbox()), "its tensors can be freed"


# Fleets


async def state_of(client: FleetClient, request: RequestId) -> dict[StageName, str]:
    trace = await client.telemetry.trace(request)
    return {task.stage: task.state for task in trace.tasks} if trace is not None else {}


async def wait_parked(client: FleetClient, requests: Sequence[RequestId]) -> None:
    """Wait until no task of the requests has a worker, and each request has a parked task."""

    async def are_parked() -> bool:
        states = [await state_of(client, request) for request in requests]
        return all(
            "parked" in of.values()
            and not {"running", "granted"} & {of[stage] for stage in STAGES if stage in of}
            for of in states
        )

    await await_until(are_parked, "the unread answers to park", timeout_s=30.0)


async def begin(client: FleetClient, specs: Sequence[RequestSpec]) -> list[ClientStream]:
    return [await client.requests.submit(spec, None) for spec in specs]


def long_specs(fleet: ThreadFleet, seeds: range) -> list[RequestSpec]:
    return [fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in seeds]


def nothing_is_held(fleet: ThreadFleet) -> bool:
    return not held(fleet) and all(
        loop.transfer.used_slots() == 0 for loop in fleet.loops if loop.worker not in fleet.killed
    )


async def test_answers_end_while_more_unread_ones_than_slots_wait(redis_url: str) -> None:
    """More clients than slots read nothing; answers of others end, and the first ones, read on
    later, are the same as without a pause.
    """
    async with open_fleet(redis_url, *FEW_SLOTS) as (fleet, client):
        expected = [await answer(client, spec) for spec in long_specs(fleet, range(NUM_SLOW))]
        slow = await begin(client, long_specs(fleet, range(NUM_SLOW)))
        ordinary = await asyncio.gather(
            *(answer(client, spec) for spec in long_specs(fleet, range(NUM_SLOW)))
        )
        for got, want in zip(ordinary, expected, strict=True):
            assert_same(got, want)
        await wait_parked(client, [stream.request_id for stream in slow])
        wait_until(lambda: not held(fleet), "workers to hold no task")
        late = await asyncio.gather(*(collected(stream, stream.spec) for stream in slow))
        for got, want in zip(late, expected, strict=True):
            assert_same(got, want)
        await wait_none_live(client)
        wait_until(lambda: nothing_is_held(fleet), "workers to hold nothing")


async def test_unread_answer_holds_back_every_stage(redis_url: str) -> None:
    """Credit passes through stages: what the first one has produced is bounded by what the client
    has read, however often the tasks between have continued.
    """
    settings = (*FEW_SLOTS, SOON, "edges.text.credits=1000")
    async with open_fleet(redis_url, *settings) as (fleet, client):
        spec, again = (fake_spec(fleet, num_tokens=400) for _ in range(2))
        expected = await answer(client, spec)
        (stream,) = await begin(client, [again])
        parts: dict[EdgeName, list[np.ndarray]] = {edge: [] for edge in spec.outputs}
        most_ahead = 0
        for _ in range(4):
            await wait_parked(client, [stream.request_id])
            trace = await client.telemetry.trace(stream.request_id)
            assert trace is not None
            edges = {edge.name: edge for edge in trace.edges}
            num_read = len(parts[EdgeName("audio")])
            most_ahead = max(most_ahead, edges[EdgeName("thought")].produced - num_read)
            for _ in range(12):
                chunk = await anext(stream)
                (tensor,) = chunk.tensors.values()
                parts[chunk.edge].append(np.frombuffer(tensor.data or b"", tensor.dtype))
        # 8 tokens; 2 chunks of codes of up to 25, 25 that wait for a chunk, 4 and a step of audio
        assert most_ahead <= 8 + 2 * 25 + 25 + 4 + 2 * 25
        rest = await collected(stream, spec)
        whole = {edge: np.concatenate([*parts[edge], rest[edge]]) for edge in rest}
        assert_same(whole, expected)
        trace = await wait_ended(client, stream.request_id)
        events = [event.what for event in trace.events]
        assert {event.stage for event in trace.events if event.what == "parked"} == set(STAGES)
        assert "lost" not in events, "parking counts as no loss"


async def test_all_workers_die_while_an_answer_is_parked(redis_url: str) -> None:
    async with open_fleet(redis_url, *FEW_SLOTS, SOON, transfer="redis") as (fleet, client):
        expected = [await answer(client, spec) for spec in long_specs(fleet, range(3))]
        slow = await begin(client, long_specs(fleet, range(3)))
        await wait_parked(client, [stream.request_id for stream in slow])
        for loop in list(fleet.loops):
            fleet.kill(loop)
        for stage in STAGES:
            fleet.add_worker(stage)
        late = await asyncio.gather(*(collected(stream, stream.spec) for stream in slow))
        for got, want in zip(late, expected, strict=True):
            assert_same(got, want)
        for stream in slow:
            trace = await wait_ended(client, stream.request_id)
            assert not any(event.what == "lost" for event in trace.events)
        wait_until(lambda: nothing_is_held(fleet), "workers to hold nothing")


async def test_abort_of_a_parked_answer_frees_everything(redis_url: str) -> None:
    async with open_fleet(redis_url, *FEW_SLOTS, SOON) as (fleet, client):
        slow = await begin(client, long_specs(fleet, range(NUM_SLOW)))
        await wait_parked(client, [stream.request_id for stream in slow])
        for stream in slow:
            await stream.abort("its client left")
        for stream in slow:
            assert (await wait_ended(client, stream.request_id)).state == "aborted"
        await wait_none_live(client)
        wait_until(lambda: nothing_is_held(fleet), "workers to hold nothing")
        (spec,) = long_specs(fleet, range(9, 10))
        assert len((await answer(client, spec))[EdgeName("text")]) == NUM_TOKENS


async def test_answer_within_the_unread_bytes_never_parks(redis_url: str) -> None:
    """An answer that fits into the client's credit is computed to its end although nothing of it is
    read; a longer one parks at the bound.
    """
    bound = 100 * BYTES_PER_FRAME
    async with open_fleet(redis_url, SOON, f"limits.max_unread_bytes={bound}") as (fleet, client):
        short, long = (fake_spec(fleet, num_tokens=count) for count in (90, 400))
        unread = await begin(client, [short, long])

        async def all_computed() -> bool:
            return set((await state_of(client, short.id)).values()) <= {"finished", "running"}

        await await_until(all_computed, "the short answer to be computed")
        await wait_parked(client, [long.id])
        audio = await audio_trace(client, long.id)
        assert 100 <= audio <= 100 + 25
        for stream in unread:
            received = await collected(stream, stream.spec)
            count = len(received[EdgeName("text")])
            assert len(received[EdgeName("audio")]) == count * BYTES_PER_FRAME // 2
        trace = await wait_ended(client, short.id)
        assert not any(event.what == "parked" for event in trace.events)


async def audio_trace(client: FleetClient, request: RequestId) -> int:
    """Return the number of chunks of audio that were produced, of one frame each."""
    trace: RequestTrace | None = await client.telemetry.trace(request)
    assert trace is not None
    return next(edge.produced for edge in trace.edges if edge.name == "audio")
