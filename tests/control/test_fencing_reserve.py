"""A task that is to run alone is reserved by one worker until that worker can claim it, for as long
as its grant stands.
"""

from typing import cast

import pytest
import redis

from fleet.conductor.driver.snapshot import lost_grants
from fleet.control import keys, scripts
from fleet.core.events import TaskLost
from fleet.core.ids import Epoch, WorkerId
from tests.control_plane import OTHER, REQUEST, ROLE, STAGE, WORKER, Control


def reserve(control: Control, worker: WorkerId = WORKER, epoch: Epoch | None = None) -> str:
    entry = control.task()["entry"]
    return control.run(
        scripts.reserve(worker, ROLE, entry, REQUEST, STAGE, epoch or control.epoch())
    )


def reserved_tasks(control: Control, worker: WorkerId = WORKER) -> set[bytes]:
    return cast("set[bytes]", control.client.smembers(keys.worker_tasks(worker)))


@pytest.fixture
def granted(control: Control) -> Control:
    """A task granted to run alone, and two workers of its role."""
    control.register(OTHER)
    assert control.grant(control.epoch(), alone=True) == "ok"
    return control


def test_reservation_ends_with_its_grant(granted: Control) -> None:
    old = granted.epoch()
    assert reserve(granted) == "ok"
    assert granted.grant(old, alone=True) == "ok"
    assert reserve(granted, epoch=old) == "stale" and reserved_tasks(granted) == set()
    assert reserve(granted, OTHER) == "ok"
    granted.abort()
    assert reserve(granted, OTHER) == "ended" and reserved_tasks(granted, OTHER) == set()


def test_gone_or_draining_worker_cannot_reserve_and_loses_reservations_without_a_death(
    granted: Control,
) -> None:
    assert reserve(granted, WorkerId("lm@test:3:c")) == "unlisted"
    assert reserve(granted) == "ok"
    granted.kill()
    assert granted.grant(granted.epoch(), alone=True) == "ok"
    assert reserve(granted, OTHER) == "ok"
    assert granted.run(scripts.order(OTHER, "drain")) == "ok"
    assert granted.grant(granted.epoch(), alone=True) == "ok"
    assert reserve(granted, OTHER) == "draining"
    assert [(event.deaths, event.alone) for event in granted.events_of(TaskLost)] == [
        (0, False)
    ] * 2


@pytest.mark.parametrize("control", ["redis"], indirect=True)
def test_overdue_reservation_is_granted_again_only_to_an_idle_worker(
    granted: Control, client: redis.Redis
) -> None:
    assert reserve(granted) == "ok"
    assert lost_grants(client, [(REQUEST, STAGE)]), "the other worker is idle"
    client.sadd(keys.worker_tasks(OTHER), "req-2|lm")
    assert not lost_grants(client, [(REQUEST, STAGE)])
    client.delete(keys.worker_tasks(OTHER))
    assert granted.run(scripts.order(OTHER, "drain")) == "ok"
    assert not lost_grants(client, [(REQUEST, STAGE)]), "the other worker is draining"
