"""A standby worker has its model loaded and claims no tasks. When a worker of its role is lost, the
same script promotes the standby worker.
"""

import pytest
import redis

from fleet.control import keys
from fleet.control.connect import text
from fleet.core.ids import EdgeName, StageName, WorkerId
from fleet.graphs import get_graph
from tests.control_plane import Control, set_deadline
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

ROLE = "lm"
TEXT = get_graph("text")


class RoleBench(Control):
    """The workers of one role as listed in Redis, without processes."""

    def join(self, names: str, *, standby: int, replicas: int = 1, role: str = ROLE) -> list[str]:
        return [
            self.register(WorkerId(name), role, replicas=replicas, standby=standby)
            for name in names
        ]

    def lose(self, name: str) -> None:
        assert self.leave(WorkerId(name), died=True) == "ok"

    def standing_by(self) -> set[str]:
        names = [text(name) for name in self.client.zrange(keys.WORKERS, 0, -1)]
        return {
            name
            for name in names
            if text(self.client.hget(keys.worker(WorkerId(name)), "standby")) == "1"
        }

    def num_promotions(self, name: str) -> int:
        """Return the number of promotion notices that the worker has received."""
        return len(self.inbox(WorkerId(name)))


def lapse(client: redis.Redis, names: str) -> None:
    for name in names:
        set_deadline(client, name, 1)


@pytest.fixture
def role(client: redis.Redis) -> RoleBench:
    return RoleBench(client)


def test_workers_fill_replicas_then_standby_then_capacity(role: RoleBench) -> None:
    assert role.join("abcd", replicas=2, standby=1) == ["ok", "ok", "standby", "ok"]
    assert role.join("e", role="another", standby=1) == ["ok"], "each role is counted separately"
    assert role.standing_by() == {"c"}


def test_every_worker_is_capacity_without_standby(role: RoleBench) -> None:
    assert role.join("ab", standby=0) == ["ok", "ok"]


def test_one_of_two_standby_workers_is_promoted_and_the_next_stands_by(role: RoleBench) -> None:
    assert role.join("abc", standby=2) == ["ok", "standby", "standby"]
    role.lose("a")
    (waiting,) = role.standing_by()
    (serving,) = {"b", "c"} - {waiting}
    assert (role.num_promotions(serving), role.num_promotions(waiting)) == (1, 0)
    role.lose("a")
    assert role.standing_by() == {waiting}, "one loss promotes one worker"
    assert role.join("d", standby=2) == ["standby"]
    role.lose(serving)
    assert len(role.standing_by()) == 1


def test_loss_without_standby_is_replaced_by_the_next_worker(role: RoleBench) -> None:
    assert role.join("ab", standby=1) == ["ok", "standby"]
    role.lose("a")
    role.lose("b")
    assert role.join("cd", standby=1) == ["ok", "standby"]


def test_lost_standby_worker_promotes_no_other(role: RoleBench) -> None:
    assert role.join("abc", standby=2) == ["ok", "standby", "standby"]
    role.lose("b")
    assert role.standing_by() == {"c"} and role.num_promotions("c") == 0


def test_standby_worker_with_lapsed_lease_is_not_promoted(role: RoleBench) -> None:
    assert role.join("abc", standby=2) == ["ok", "standby", "standby"]
    lapse(role.client, "b")
    role.lose("a")
    assert role.standing_by() == {"b"} and role.num_promotions("c") == 1


@pytest.mark.parametrize("drained", [True, False])
def test_standby_worker_with_late_lease_is_promoted_at_its_renewal(
    role: RoleBench, drained: bool
) -> None:
    assert role.join("abc", standby=2) == ["ok", "standby", "standby"]
    assert role.renew(WorkerId("b")) == "ok"
    assert role.standing_by() == {"b", "c"}, "another worker serves"
    lapse(role.client, "abc")
    assert (role.drain if drained else role.leave)(WorkerId("a")) == "ok"
    assert role.standing_by() == {"b", "c"}
    assert [role.renew(WorkerId(name)) for name in "bcb"] == ["ok"] * 3
    assert role.standing_by() == {"c"}
    assert (role.num_promotions("b"), role.num_promotions("c")) == (1, 0)


def test_lapsed_worker_is_not_counted_before_it_is_fenced(role: RoleBench) -> None:
    assert role.join("ab", standby=1) == ["ok", "standby"]
    lapse(role.client, "ab")
    assert role.join("cde", standby=1) == ["ok", "standby", "ok"]


def test_leaving_worker_is_replaced_once(role: RoleBench) -> None:
    assert role.join("abc", standby=2) == ["ok", "standby", "standby"]
    for _ in range(2):
        assert role.drain(WorkerId("a")) == "ok"
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
