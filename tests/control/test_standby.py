"""A standby worker is loaded and claims nothing; when a worker of its role is lost it is promoted,
in the same script.
"""

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.ids import EdgeName, StageName, WorkerId
from fleet.graphs import get_graph
from tests.control_plane import set_deadline
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec,
    gateway,
    in_step,
    thread_fleet,
)
from tests.support import wait_until

ROLE, LEASE_US = "lm", 60_000_000
TEXT = get_graph("text")


class RoleBench:
    """The workers of one role, as listed in Redis; no process."""

    def __init__(self, client: redis.Redis, *, replicas: int, standby: int) -> None:
        self.client, self._replicas, self._standby = client, replicas, standby

    def join(self, name: str, role: str = ROLE) -> str:
        fields: dict[str, str | bytes] = {"kind": "worker"}
        call = scripts.register(
            WorkerId(name), role, LEASE_US, fields, replicas=self._replicas, standby=self._standby
        )
        return text(run(self.client, call))

    def lose(self, name: str) -> None:
        assert text(run(self.client, scripts.fence_worker("", WorkerId(name), died=True))) == "ok"

    def renew(self, name: str) -> None:
        assert text(run(self.client, scripts.renew(WorkerId(name), LEASE_US, {}))) == "ok"

    def drain(self, name: str) -> None:
        assert text(run(self.client, scripts.drain(WorkerId(name)))) == "ok"

    def standing_by(self) -> set[str]:
        names = [text(name) for name in self.client.zrange(keys.WORKERS, 0, -1)]
        return {
            name
            for name in names
            if text(self.client.hget(keys.worker(WorkerId(name)), "standby")) == "1"
        }

    def num_promotions(self, name: str) -> int:
        """Return the number of promotions the worker was notified of."""
        return self.client.xlen(keys.inbox(WorkerId(name)))


def lapse(client: redis.Redis, names: str) -> None:
    for name in names:
        set_deadline(client, name, 1)


def test_workers_fill_replicas_then_standby_then_capacity(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=2, standby=1)
    assert [role.join(name) for name in "abcd"] == ["ok", "ok", "standby", "ok"]
    assert role.join("other", role="another") == "ok", "each role is counted separately"
    assert role.standing_by() == {"c"}


def test_every_worker_is_capacity_without_standby(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=0)
    assert [role.join(name) for name in "ab"] == ["ok", "ok"]


def test_one_of_two_standby_workers_is_promoted_and_the_next_stands_by(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.lose("a")
    (waiting,) = role.standing_by()
    (serving,) = {"b", "c"} - {waiting}
    assert (role.num_promotions(serving), role.num_promotions(waiting)) == (1, 0)
    role.lose("a")
    assert role.standing_by() == {waiting}, "one loss promotes one worker"
    assert role.join("d") == "standby"
    role.lose(serving)
    assert len(role.standing_by()) == 1


def test_loss_without_standby_is_replaced_by_the_next_worker(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=1)
    assert [role.join(name) for name in "ab"] == ["ok", "standby"]
    role.lose("a")
    role.lose("b")
    assert [role.join(name) for name in "cd"] == ["ok", "standby"]


def test_lost_standby_worker_promotes_no_other(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.lose("b")
    assert role.standing_by() == {"c"} and role.num_promotions("c") == 0


def test_standby_worker_with_lapsed_lease_is_not_promoted(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    lapse(client, "b")
    role.lose("a")
    assert role.standing_by() == {"b"} and role.num_promotions("c") == 1


@pytest.mark.parametrize("drained", [True, False])
def test_standby_worker_with_late_lease_is_promoted_at_its_renewal(
    client: redis.Redis, drained: bool
) -> None:
    role = RoleBench(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.renew("b")
    assert role.standing_by() == {"b", "c"}, "another worker serves"
    lapse(client, "abc")
    (role.drain if drained else role.lose)("a")
    assert role.standing_by() == {"b", "c"}
    for name in "bcb":
        role.renew(name)
    assert role.standing_by() == {"c"} and (role.num_promotions("b"), role.num_promotions("c")) == (
        1,
        0,
    )


def test_lapsed_worker_is_not_counted_before_it_is_fenced(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=1)
    assert [role.join(name) for name in "ab"] == ["ok", "standby"]
    lapse(client, "ab")
    assert [role.join(name) for name in "cde"] == ["ok", "standby", "ok"]


def test_leaving_worker_is_replaced_once(client: redis.Redis) -> None:
    role = RoleBench(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.drain("a")
    role.drain("a")
    assert len(role.standing_by()) == 1
    role.lose("a")
    assert len(role.standing_by()) == 1


async def test_answer_continues_at_the_promoted_worker(redis_url: str) -> None:
    with thread_fleet(redis_url, "stages.lm.standby=1", *in_step(TEXT)) as fleet:
        (serving,) = fleet.loops
        standby = fleet.add_worker(ROLE)
        assert (serving.availability.standing_by, standby.availability.standing_by) == (False, True)
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            spec = fake_spec(fleet)

            def kill(edge: EdgeName, index: int) -> None:
                if index == 8:
                    assert fleet.owner(spec.id, StageName(ROLE)) is serving, (
                        "a standby worker claims nothing"
                    )
                    fleet.kill(serving)
                    wait_until(lambda: spec.id in standby.tasks, "the promoted worker to continue")

            assert_same(await answer_disturbed(client, spec, None, kill), expected)
        assert fleet.add_worker(ROLE).availability.standing_by
