"""Grants: a task is granted at an epoch, waits in the queue of its role, and is claimed by one
worker.
"""

import asyncio

from fleet.control import keys, scripts
from fleet.core.ids import EdgeName, WorkerId
from tests.control_plane import LEASE_US, OTHER, REQUEST, ROLE, STAGE, WORKER, Control
from tests.harness import answer, fake_spec, open_fleet


def test_epochs_only_rise_and_follow_the_clock_of_redis(control: Control) -> None:
    seen = [control.epoch()]
    for _ in range(3):
        seen.append(control.grant())
    seconds, _ = control.client.time()
    assert seen == sorted(set(seen))
    assert abs(seen[-1] / 1e6 - seconds) < 5


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
