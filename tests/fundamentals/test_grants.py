"""Grants: a task is granted at an epoch, waits in the queue of its role, and is claimed by one
worker.
"""

import asyncio
from collections.abc import Callable

import pytest

from fleet.control import keys, scripts
from fleet.core.ids import EdgeName, RequestId, WorkerId
from tests.control_plane import LEASE_US, OTHER, REQUEST, ROLE, STAGE, WORKER, Control
from tests.harness import answer, fake_spec, open_fleet


def test_epochs_only_rise_and_follow_the_clock_of_redis(control: Control) -> None:
    seen, times = [control.epoch()], [control.client.time()]
    for _ in range(3):
        seen.append(control.grant())
        times.append(control.client.time())
    before, *after = [seconds * 1_000_000 + microseconds for seconds, microseconds in times]
    assert seen == sorted(set(seen))
    for epoch, earliest, latest in zip(seen[1:], (before, *after), after, strict=False):
        assert earliest <= epoch <= latest


def take_delivery(control: Control, worker: WorkerId = WORKER) -> None:
    """Read the grants of the role as a worker does, which then claims none of them."""
    control.client.xreadgroup(keys.GROUP, worker, {keys.role(ROLE): ">"}, noack=True)


def test_overdue_grant_is_repeated_once_it_was_delivered(control: Control) -> None:
    """A grant that waits in its role's queue is not lost: the role is busy. A grant that a worker
    has read and not claimed is made again.
    """
    first = control.epoch()
    assert control.watch() == "ok" and control.epoch() == first
    take_delivery(control)
    assert control.watch(timeout_us=LEASE_US) == "ok" and control.epoch() == first, "not overdue"
    assert control.watch() == "ok" and control.epoch() > first
    assert control.grants()[-1] == (STAGE, control.epoch(), False)
    assert [control.claim(first), control.claim()] == ["stale", "ok"]


def test_claimed_grant_is_not_overdue(control: Control) -> None:
    epoch = control.own()
    assert control.watch() == "ok" and control.epoch() == epoch
    assert control.client.exists(keys.GRANTED) == 0


def test_grant_is_claimed_once_and_by_a_listed_worker(control: Control) -> None:
    epoch = control.own()
    assert control.claim(epoch, OTHER) == "unlisted"
    control.register(OTHER)
    assert control.claim(epoch, OTHER) == "stale"


def test_repeated_grant_replaces_the_first(control: Control) -> None:
    first = control.epoch()
    assert control.grant() > first
    assert control.grants() == [(STAGE, control.epoch(), False)]
    assert [control.claim(first), control.claim()] == ["stale", "ok"]


def test_task_to_run_alone_is_reserved_by_one_worker(control: Control) -> None:
    """A worker that still runs other tasks reserves a task that must run alone, and claims it once
    nothing else runs there.
    """

    def reserve(worker: WorkerId) -> str:
        entry = control.task()["entry"]
        return control.run(scripts.reserve(worker, ROLE, entry, REQUEST, STAGE, control.epoch()))

    control.register(OTHER)
    control.grant_alone()
    assert [reserve(WORKER), reserve(WORKER), reserve(OTHER)] == ["ok", "ok", "stale"]
    assert control.grants() == [], "the grant has left the queue of its role"
    assert control.tasks_of() == {f"{REQUEST}|{STAGE}".encode()}
    assert [control.claim(worker=OTHER), control.claim()] == ["stale", "ok"]
    assert reserve(WORKER) == "stale", "the task runs"


async def test_more_requests_than_slots_all_end(redis_url: str) -> None:
    """With more requests than slots, grants wait until a slot is free. The oldest request always
    gets all slots it needs, so every request ends.
    """
    slots = ("stages.thinker.max_batch=2", "stages.talker.max_batch=3")
    async with open_fleet(redis_url, *slots) as (fleet, client):
        specs = [fake_spec(fleet, seed=number, num_tokens=20) for number in range(12)]
        answers = await asyncio.gather(*(answer(client, spec) for spec in specs))
        assert all(len(received[EdgeName("audio")]) == 20 * 1920 for received in answers)


def test_recovered_tasks_are_read_before_new_ones_and_each_in_the_order_of_requests(
    control: Control,
) -> None:
    """Tasks that were lost are read before tasks that no worker has had yet, whichever waits for
    longer. Among themselves both keep the order of their requests, and a worker reads no more
    grants than it has free slots.
    """
    owned = [RequestId(f"req-{number}") for number in (1, 3, 2)]
    for request in owned[1:]:
        assert control.submit(request)[0] == "ok"
    assert control.read(free=3) == owned
    for request in owned:
        assert control.claim(request=request) == "ok"
    new = [RequestId(f"req-{number}") for number in (4, 5, 6)]
    for request in new:
        assert control.submit(request)[0] == "ok"
    control.register(OTHER)
    control.kill()
    read = [control.read(OTHER, free) for free in (2, 2, 9, 9)]
    assert read == [sorted(owned)[:2], [*sorted(owned)[2:], new[0]], new[1:], []]


def finish_and_lose_tensors(control: Control) -> str:
    assert control.append(control.epoch(), finish=True) == "ok"
    return control.lose_tensors()


def leave_unclaimed(control: Control) -> str:
    """Let the task's grant be read by a worker that does not claim it, and become overdue."""
    assert control.redeliver() == "ok"
    assert control.read() == [REQUEST]
    return control.watch()


WAYS_BACK: dict[str, Callable[[Control], str]] = {
    "handed off": lambda control: control.hand_off(control.epoch()),
    "lost with its batch": lambda control: control.lose_task(control.epoch()),
    "redelivered": lambda control: control.redeliver(),
    "left by its worker": lambda control: control.leave(),
    "recomputed": finish_and_lose_tensors,
    "overdue": leave_unclaimed,
}


@pytest.mark.parametrize("way", WAYS_BACK)
def test_task_that_the_role_had_before_is_read_before_new_ones(control: Control, way: str) -> None:
    control.register(OTHER)
    assert control.read() == [REQUEST] and control.claim() == "ok"
    assert control.submit("req-2")[0] == "ok"
    assert WAYS_BACK[way](control) == "ok"
    assert control.read(OTHER, 2) == [REQUEST, "req-2"]


def test_read_grant_is_reserved_until_it_is_claimed(control: Control) -> None:
    """A grant that was read belongs to its reader: no other worker may claim it, and if the reader
    ends before it claims the grant, the task is granted again at once and no death is counted.
    """
    control.register(OTHER)
    assert [control.read(), control.read(OTHER)] == [[REQUEST], []]
    assert control.tasks_of() == {f"{REQUEST}|{STAGE}".encode()}
    assert control.claim(worker=OTHER) == "stale"
    control.kill()
    assert control.read(OTHER) == [REQUEST]
    assert [control.claim(worker=OTHER), control.task().get("deaths")] == ["ok", None]
    assert control.grants() == []


def test_grants_are_read_by_listed_workers_that_accept_tasks_and_only_while_open(
    control: Control,
) -> None:
    control.register(OTHER)
    assert control.order("drain", OTHER) == "ok"
    assert control.read(OTHER) == []
    for number in range(2, 5):
        assert control.submit(f"req-{number}")[0] == "ok"
    assert control.claim(request=RequestId("req-2")) == "ok"
    assert control.abort(RequestId("req-3")) == "ok"
    assert control.read(free=9) == [REQUEST, "req-4"]
