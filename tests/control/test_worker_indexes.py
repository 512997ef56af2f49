"""The indexes of listed workers equal the workers' hashes after any sequence of scripts, and bound
what other scripts read.
"""

import random
from typing import cast

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import first_text, run, text
from fleet.core.ids import RoleName, WorkerId, place_of, role_of
from tests.control_plane import (
    GATEWAY,
    LEASE_US,
    ROLE,
    WORKER,
    Control,
    join,
    num_commands,
    set_deadline,
    submission,
)

ROLES = ("lm", "talker.prefill", "thinker[0:19]")
STAGE_FIELDS = {"talker.prefill": {"stage": "talker", "dtype": "float32"}}
NUM_WALKS, NUM_CALLS = 6, 80
FEW, MANY = 3, 300


class Members:
    """Makes random calls of every script that changes which workers are listed, or their listed
    state.
    """

    def __init__(self, client: redis.Redis, seed: int) -> None:
        client.flushdb()
        self.client, self.rng = client, random.Random(seed)
        self.leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 600_000)))
        self.num_started = 0
        self.known: list[WorkerId] = []

    def register(self) -> None:
        role, place = self.rng.choice((*ROLES, "gateway")), self.rng.randrange(4)
        self.num_started += 1
        worker = WorkerId(f"{role}@host:{place}:{self.num_started}")
        fields: dict[str, str | bytes] = {
            "kind": "worker",
            "package": self.rng.choice("111112"),
            **STAGE_FIELDS.get(role, {}),
        }
        call = scripts.register(
            worker, "" if role == "gateway" else role, LEASE_US, fields, replicas=1, standby=2
        )
        run(self.client, call)
        self.known.append(worker)

    def change(self) -> None:
        worker = self.rng.choice(self.known)
        call = self.rng.choice(
            [
                *[scripts.renew(worker, LEASE_US + self.rng.randrange(1000), {"running": 1})] * 3,
                scripts.drain(worker),
                scripts.order(worker, self.rng.choice(("drain", "resume", "stop"))),
                scripts.order(worker, "resume"),
                scripts.fence_worker("", worker, died=self.rng.random() < 0.5),
                scripts.fence_worker(self.leader, worker),
            ]
        )
        if self.rng.random() < 0.2:
            set_deadline(self.client, worker, 1)
        run(self.client, call)

    def check(self, after: int) -> set[str]:
        """Compare every index with the hashes; return the worker states that occur."""
        listed = cast(
            "list[tuple[bytes, float]]", self.client.zrange(keys.WORKERS, 0, -1, withscores=True)
        )
        expected: dict[str, dict[str, float]] = {}
        groups: set[str] = set()
        for name, deadline in listed:
            worker = WorkerId(text(name))
            names = ("role", "standby", "draining", "ordered_off", "settings_group")
            role, standby, draining, off, group = (
                text(field)
                for field in cast(
                    "list[bytes | None]", self.client.hmget(keys.worker(worker), names)
                )
            )
            status = (
                "standby"
                if standby
                else "ordered_off"
                if off
                else "leaving"
                if draining
                else "accepting"
            )
            groups.add(group)
            expected.setdefault(keys.settings_group(group), {})[worker] = deadline
            if role:
                expected.setdefault(keys.role_workers(RoleName(role), status), {})[worker] = (
                    deadline
                )
        assert self.indexed() == expected, f"call {after}"
        assert {
            text(group) for group in cast("set[bytes]", self.client.smembers(keys.SETTINGS_GROUPS))
        } == groups
        self.check_places({WorkerId(text(name)) for name, _ in listed})
        return {key.rpartition(":")[2] for key in expected}

    def indexed(self) -> dict[str, dict[str, float]]:
        patterns = (keys.role_workers(RoleName("*"), "*"), keys.settings_group("*"))
        names = [text(key) for pattern in patterns for key in self.client.scan_iter(match=pattern)]
        return {
            key: {
                text(name): score
                for name, score in cast(
                    "list[tuple[bytes, float]]", self.client.zrange(key, 0, -1, withscores=True)
                )
            }
            for key in names
        }

    def check_places(self, listed: set[WorkerId]) -> None:
        places = cast("dict[bytes, bytes]", self.client.hgetall(keys.PLACES))
        for place, name in places.items():
            worker = WorkerId(text(name))
            assert worker in listed
            assert text(place) == ":".join(map(str, place_of(worker)))


def test_indexes_equal_the_hashes_after_any_sequence_of_scripts(client: redis.Redis) -> None:
    seen: set[str] = set()
    for seed in range(NUM_WALKS):
        members = Members(client, seed)
        members.register()
        for number in range(NUM_CALLS):
            (members.register if members.rng.random() < 0.3 else members.change)()
            seen |= members.check(number)
        for worker in members.known:
            run(client, scripts.fence_worker("", worker))
        rows = {text(key): keys.row_of(text(key)) for key in client.scan_iter()}
        left = [
            key for key, row in rows.items() if row is not None and row.life in ("lease", "index")
        ]
        assert left == [keys.CONDUCTOR], "the indexes end with the last worker"
    assert set(keys.STATUSES) <= seen


def fill(client: redis.Redis, number: int) -> str:
    """Register the only worker of a role and `number` workers of two other roles; return a leader's
    token.
    """
    client.flushdb()
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 600_000)))
    assert (
        first_text(run(client, scripts.register(GATEWAY, "", LEASE_US, {"kind": "gateway"})))
        == "ok"
    )
    assert join(client, WORKER, package="1", checkpoint="a") == ["ok"]
    for position in range(number):
        role = ("thinker", "talker")[position % 2]
        assert join(client, f"{role}@host:{position}:a", package="1", checkpoint="a") == ["ok"]
    return leader


SCRIPT_CALLS = {
    "submit": (submission("req-1", roles=[ROLE, RoleName("thinker"), RoleName("talker")]), "ok"),
    "submit to no worker": (submission("req-1", roles=[RoleName("missing")]), "no_worker"),
    "register": (
        scripts.register(
            WorkerId("lm@new:1:a"), "lm", LEASE_US, {"package": "1", "checkpoint": "a"}, standby=1
        ),
        "standby",
    ),
    "refused register": (
        scripts.register(WorkerId("lm@new:1:a"), "lm", LEASE_US, {"package": "2"}),
        "skew",
    ),
    "renew": (scripts.renew(WORKER, LEASE_US, {"running": 1}), "ok"),
    "drain": (scripts.drain(WORKER), "ok"),
    "fence": (scripts.fence_worker("", WORKER, died=True), "ok"),
    "announce a child": (
        scripts.announce_start(ROLE, "host:9", LEASE_US, child="host:8888", begins_us=0, number=1),
        "ok",
    ),
}


@pytest.mark.parametrize("name", list(SCRIPT_CALLS))
def test_script_reads_no_more_in_a_larger_fleet(client: redis.Redis, name: str) -> None:
    call, answer = SCRIPT_CALLS[name]
    counts: list[int] = []
    for number in (FEW, MANY):
        fill(client, number)
        counts.append(num_commands(client, call, answer))
    assert counts[0] == counts[1] < 60


def test_standby_renewal_reads_no_more_in_a_larger_fleet(client: redis.Redis) -> None:
    counts: list[int] = []
    standby = WorkerId("lm@standby:1:a")
    for number in (FEW, MANY):
        fill(client, number)
        run(client, scripts.register(standby, "lm", LEASE_US, {"package": "1"}, standby=1))
        set_deadline(client, standby, 1)
        run(client, scripts.order(WORKER, "drain"))
        counts.append(num_commands(client, scripts.renew(standby, LEASE_US, {}), "ok"))
        assert client.hget(keys.worker(standby), "standby") == b"", (
            "its own late lease is renewed, so it takes over"
        )
    assert counts[0] == counts[1]


def test_process_is_known_by_its_place_until_its_last_incarnation_ends(control: Control) -> None:
    """A process is found by its place until its last incarnation ends; a new incarnation may join
    before the former one is fenced.
    """
    role, child = RoleName(role_of(WORKER)), "test:1"
    announced = scripts.announce_start(
        role, "keeper:1", LEASE_US, child=child, begins_us=0, number=1
    )
    assert control.run(announced) == "begun"
    again = WorkerId(f"{role}@{child}:z")
    assert control.register(again) == "ok"
    control.kill(WORKER)
    assert control.run(announced) == "begun"
    assert control.leave(again) == "ok"
    assert control.run(announced) == "ok"
