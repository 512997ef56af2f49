"""Ordered numbers of workers: how several `fleet up` commands share them, and what each starts and
stops.
"""

import os
from dataclasses import dataclass, field

import pytest

from fleet.cli.scaling import KeptWorker, ScaledRole, choose_leaving
from fleet.config.roles import Role
from fleet.control import keys, scripts
from fleet.control.connect import run, stream_entries, text, texts
from fleet.control.starting import place_here
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from tests.control_plane import OTHER, ROLE, Control

LM = RoleName(ROLE)
LEASE_US = 60_000_000


def ask(
    control: Control, supervisor: str, *, num_workers: int = 1, possible: int = 64
) -> tuple[str, int]:
    """Return the ordered number and the share of a supervisor that renews its lease."""
    call = scripts.share_workers(supervisor, LEASE_US, [(LM, num_workers, possible)])
    wanted, share = texts(run(control.client, call))
    return wanted, int(share)


def order(control: Control, number: int) -> str:
    return control.run(scripts.scale(LM, number, "night-shift"))


def settled(control: Control, *supervisors: str, possible: int = 64) -> dict[str, int]:
    """Let the supervisors ask in turn until no share changes; return the shares."""
    shares: dict[str, int] = {}
    while shares != (now := {s: ask(control, s, possible=possible)[1] for s in supervisors}):
        shares = now
    return shares


def test_order_needs_a_supervisor_and_is_entered_in_the_journal_once(control: Control) -> None:
    assert order(control, 2) == "unmanaged"
    assert ask(control, "a:1") == ("", 1)
    assert [order(control, 2), order(control, 2)] == ["ok", "ok"]
    journal = stream_entries(control.client.xrange(keys.JOURNAL))
    ordered = [entry for _, entry in journal if text(entry["what"]) == "ordered"]
    assert [(text(e["role"]), text(e["by"]), text(e["detail"])) for e in ordered] == [
        (ROLE, "night-shift", "2 workers wanted")
    ]
    assert ask(control, "a:1") == ("2", 2)


def test_smallest_share_grows_and_largest_shrinks(control: Control) -> None:
    settled(control, "a:1", "b:1")
    order(control, 5)
    assert sorted(settled(control, "a:1", "b:1").values()) == [2, 3]
    order(control, 64)
    assert settled(control, "a:1", "b:1") == {"a:1": 32, "b:1": 32}
    order(control, 1)
    assert sorted(settled(control, "a:1", "b:1").values()) == [0, 1]
    order(control, 0)
    assert settled(control, "a:1", "b:1") == {"a:1": 0, "b:1": 0}


def test_only_the_supervisor_with_the_smallest_share_takes_one(control: Control) -> None:
    ask(control, "a:1", num_workers=2)
    ask(control, "b:1", num_workers=1)
    order(control, 4)
    assert ask(control, "a:1") == ("4", 2)
    assert ask(control, "b:1") == ("4", 2)
    assert [ask(control, "b:1"), ask(control, "a:1")] == [("4", 2), ("4", 2)]


def test_supervisor_without_room_leaves_workers_to_another(control: Control) -> None:
    settled(control, "a:1", "b:1")
    order(control, 5)
    ask(control, "a:1", possible=1)
    assert [ask(control, "b:1")[1], ask(control, "a:1", possible=1)[1]] == [4, 1]


def test_share_of_a_lapsed_supervisor_is_taken_by_another(control: Control) -> None:
    settled(control, "a:1", "b:1")
    order(control, 4)
    settled(control, "a:1", "b:1")
    control.client.zadd(keys.SUPERVISORS, {"a:1": 1})
    assert ask(control, "b:1") == ("4", 4)
    assert ask(control, "a:1", num_workers=2)[1] == 2, "it is back with what it runs"
    assert settled(control, "b:1", "a:1") == {"a:1": 2, "b:1": 2}


def test_orders_end_with_the_last_supervisor(control: Control) -> None:
    ask(control, "a:1")
    order(control, 3)
    assert ask(control, "a:1") == ("3", 3)
    run(control.client, scripts.share_workers("a:1", 0))
    assert order(control, 4) == "unmanaged"
    assert ask(control, "a:2", num_workers=2) == ("", 2), "the configuration counts again"


def test_ordered_number_decides_which_workers_stand_by(control: Control) -> None:
    ask(control, "a:1")
    assert control.register(OTHER, standby=1) == "standby"
    order(control, 2)
    assert control.client.hget(keys.worker(OTHER), "standby") == b""
    order(control, 1)
    control.order("drain", OTHER)
    assert control.register(WorkerId("lm@host:9:aa"), standby=1) == "standby"
    assert control.client.hget(keys.worker(WorkerId("lm@host:9:aa")), "standby") == b"1"


@dataclass
class KeeperDouble:
    """A keeper double: the process and what became of it."""

    name: str
    pid: int
    has_ended: bool = False
    is_retired: bool = False


@dataclass
class ManagerDouble:
    """A manager double without processes. A started worker has this process's pid plus its number
    times 1,000,000, so that no real process is meant.
    """

    keepers: dict[str, KeeperDouble] = field(default_factory=dict[str, KeeperDouble])
    said: list[str] = field(default_factory=list[str])

    def start(self, role: RoleName, number: int) -> None:
        name = f"{role}.{number}"
        self.keepers[name] = KeeperDouble(name=name, pid=os.getpid() + number * 1_000_000)

    def find(self, name: str) -> KeeperDouble | None:
        return self.keepers.get(name)

    def retire(self, name: str) -> None:
        self.keepers[name].is_retired = True

    def say(self, text: str) -> None:
        self.said.append(text)

    def retired(self) -> list[str]:
        return [name for name, kept in self.keepers.items() if kept.is_retired]


@pytest.fixture
def manager() -> ManagerDouble:
    return ManagerDouble()


@pytest.fixture
def role(manager: ManagerDouble) -> ScaledRole:
    manager.start(LM, 1)
    return ScaledRole(
        Role(name=LM, stage=StageName(ROLE), walks=(), replicas=1), manager, manager.start
    )


def join(control: Control, manager: ManagerDouble, number: int) -> WorkerId:
    worker = WorkerId(f"{ROLE}@{place_here(manager.keepers[f'{ROLE}.{number}'].pid)}:{number:06x}")
    assert control.register(worker, ROLE, replicas=9) == "ok"
    return worker


def test_unordered_role_is_left_alone(
    control: Control, manager: ManagerDouble, role: ScaledRole
) -> None:
    manager.keepers["lm.1"].has_ended = True
    role.settle(control.client, None, 1)
    assert manager.retired() == [] and list(manager.keepers) == ["lm.1"]


def test_more_workers_are_started_and_fewer_drain_before_they_stop(
    control: Control, manager: ManagerDouble, role: ScaledRole
) -> None:
    role.settle(control.client, 3, 3)
    assert list(manager.keepers) == ["lm.1", "lm.2", "lm.3"]
    workers = {number: join(control, manager, number) for number in (1, 2, 3)}
    control.client.sadd(keys.worker_tasks(workers[3]), "req-1|lm")
    role.settle(control.client, 2, 2)
    assert text(control.client.hget(keys.worker(workers[2]), "draining")) == "1", "it has no tasks"
    assert manager.retired() == [], "a task may have come before the drain"
    role.settle(control.client, 1, 1)
    assert manager.retired() == ["lm.2"]
    leaving = {
        n for n in (1, 3) if control.client.hget(keys.worker(workers[n]), "draining") == b"1"
    }
    assert leaving == {1}, "the other one has a task"


def test_worker_with_tasks_is_not_stopped_and_can_be_wanted_again(
    control: Control, manager: ManagerDouble, role: ScaledRole
) -> None:
    role.settle(control.client, 2, 2)
    workers = {number: join(control, manager, number) for number in (1, 2)}
    for worker in workers.values():
        control.client.sadd(keys.worker_tasks(worker), f"{RequestId('req-1')}|lm")
    for _ in range(3):
        role.settle(control.client, 1, 1)
    assert manager.retired() == []
    assert control.client.hget(keys.worker(workers[2]), "draining") == b"1"
    role.settle(control.client, 2, 2)
    assert control.client.hget(keys.worker(workers[2]), "draining") == b""
    assert len(manager.keepers) == 2, "it is resumed, and no other is started"


def test_worker_that_cannot_start_is_not_tried_again_until_the_next_order(
    control: Control, manager: ManagerDouble, role: ScaledRole
) -> None:
    role.settle(control.client, 2, 2)
    del manager.keepers["lm.2"]
    role.settle(control.client, 2, 2)
    assert role.num_possible == 1 and list(manager.keepers) == ["lm.1"]
    role.settle(control.client, 3, 3)
    assert list(manager.keepers) == ["lm.1", "lm.2", "lm.3"]


def test_worker_that_a_person_stopped_is_replaced_while_a_number_is_ordered(
    control: Control, manager: ManagerDouble, role: ScaledRole
) -> None:
    role.settle(control.client, 1, 1)
    manager.keepers["lm.1"].has_ended = True
    role.settle(control.client, 1, 1)
    assert manager.retired() == ["lm.1"] and list(manager.keepers) == ["lm.1", "lm.2"]


def test_worker_whose_end_costs_least_is_chosen() -> None:
    def kept(number: int, name: str = "w", *, standby: bool = False, tasks: int = 0) -> KeptWorker:
        return KeptWorker(number=number, id=WorkerId(name), is_standby=standby, num_tasks=tasks)

    busy, idle, waiting = kept(1, tasks=2), kept(2), kept(3, standby=True)
    assert choose_leaving([busy, idle, waiting]) is idle
    assert choose_leaving([busy, waiting]) is busy, "standby workers are wanted in addition"
    assert choose_leaving([busy, idle, new := kept(4, "")]) is new
    assert choose_leaving([idle, last := kept(5)]) is last
