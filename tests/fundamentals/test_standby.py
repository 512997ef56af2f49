"""A worker that stands by is loaded and takes nothing; when one of its role is lost it takes its place, in the same script."""

from collections.abc import Iterator

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import connect, run, text
from fleet.core.ids import EdgeName, StageName, WorkerId
from fleet.graphs import get_graph
from tests.harness import answer, assert_same, fake_spec, gateway, heard, in_step, thread_fleet
from tests.support import wait_until

ROLE, LEASE_US = "lm", 60_000_000
TEXT = get_graph("text")
NUM_TOKENS = 40


class Role:
    """The workers of one role, as Redis has them; no process."""

    def __init__(self, client: redis.Redis, *, replicas: int, standby: int) -> None:
        self.client, self._replicas, self._standby = client, replicas, standby

    def join(self, name: str, role: str = ROLE) -> str:
        fields: dict[str, str | bytes] = {"kind": "worker"}
        call = scripts.register(WorkerId(name), role, LEASE_US, fields, replicas=self._replicas, standby=self._standby)
        return text(run(self.client, call))

    def lose(self, name: str) -> None:
        assert text(run(self.client, scripts.fence_worker("", WorkerId(name), died=True))) == "ok"

    def renew(self, name: str) -> None:
        assert text(run(self.client, scripts.renew(WorkerId(name), LEASE_US, {}))) == "ok"

    def drain(self, name: str) -> None:
        assert text(run(self.client, scripts.drain(WorkerId(name)))) == "ok"

    def standing_by(self) -> set[str]:
        names = [text(name) for name in self.client.zrange(keys.WORKERS, 0, -1)]
        return {name for name in names if text(self.client.hget(keys.worker(WorkerId(name)), "standby")) == "1"}

    def told(self, name: str) -> int:
        """How often it was told to take tasks."""
        return self.client.xlen(keys.inbox(WorkerId(name)))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


def test_workers_serve_first_then_stand_by_then_are_more_capacity(client: redis.Redis) -> None:
    role = Role(client, replicas=2, standby=1)
    assert [role.join(name) for name in "abcd"] == ["ok", "ok", "standby", "ok"]
    assert role.join("other", role="another") == "ok", "each role counts for itself"
    assert role.standing_by() == {"c"}


def test_without_standby_every_worker_is_capacity(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=0)
    assert [role.join(name) for name in "ab"] == ["ok", "ok"]


def test_of_two_that_stand_by_one_takes_the_place_and_the_next_worker_stands_by_again(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.lose("a")
    (waiting,) = role.standing_by()
    (serving,) = {"b", "c"} - {waiting}
    assert (role.told(serving), role.told(waiting)) == (1, 0)
    role.lose("a")
    assert role.standing_by() == {waiting}, "one loss is made up for once"
    assert role.join("d") == "standby"
    role.lose(serving)
    assert len(role.standing_by()) == 1


def test_a_loss_with_nobody_standing_by_is_made_up_for_by_the_next_to_join(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=1)
    assert [role.join(name) for name in "ab"] == ["ok", "standby"]
    role.lose("a")
    role.lose("b")
    assert [role.join(name) for name in "cd"] == ["ok", "standby"]


def test_one_that_stood_by_and_is_lost_is_no_loss(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.lose("b")
    assert role.standing_by() == {"c"} and role.told("c") == 0


def test_one_whose_own_lease_has_lapsed_takes_nobodys_place(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    client.zadd(keys.WORKERS, {"b": 1})
    role.lose("a")
    assert role.standing_by() == {"b"} and role.told("c") == 1


@pytest.mark.parametrize("drained", [True, False])
def test_standby_whose_lease_was_late_takes_the_place_once_it_renews(client: redis.Redis, drained: bool) -> None:
    role = Role(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.renew("b")
    assert role.standing_by() == {"b", "c"}, "another one serves"
    client.zadd(keys.WORKERS, {"a": 1, "b": 1, "c": 1})
    (role.drain if drained else role.lose)("a")
    assert role.standing_by() == {"b", "c"}
    for name in "bcb":
        role.renew(name)
    assert role.standing_by() == {"c"} and (role.told("b"), role.told("c")) == (1, 0)


def test_the_dead_are_not_counted_before_they_are_fenced(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=1)
    assert [role.join(name) for name in "ab"] == ["ok", "standby"]
    client.zadd(keys.WORKERS, {"a": 1, "b": 1})
    assert [role.join(name) for name in "cde"] == ["ok", "standby", "ok"]


def test_who_leaves_is_replaced_when_it_says_so_and_not_again_at_its_goodbye(client: redis.Redis) -> None:
    role = Role(client, replicas=1, standby=2)
    assert [role.join(name) for name in "abc"] == ["ok", "standby", "standby"]
    role.drain("a")
    role.drain("a")
    assert len(role.standing_by()) == 1
    role.lose("a")
    assert len(role.standing_by()) == 1


async def test_an_answer_goes_on_with_the_one_that_stood_by(redis_url: str) -> None:
    with thread_fleet(redis_url, "stages.lm.standby=1", *in_step(TEXT)) as fleet:
        (serving,) = fleet.loops
        standby = fleet.add_worker(ROLE)
        assert (serving.availability.standing_by, standby.availability.standing_by) == (False, True)
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
            spec = fake_spec(fleet, num_tokens=NUM_TOKENS)

            def kill(edge: EdgeName, index: int) -> None:
                if index == 8:
                    assert fleet.owner(spec.id, StageName(ROLE)) is serving, "who stands by takes nothing"
                    fleet.kill(serving)
                    wait_until(lambda: spec.id in standby.tasks, "the one that stood by to go on")

            assert_same(await heard(client, spec, None, kill), expected)
        assert fleet.add_worker(ROLE).availability.standing_by
