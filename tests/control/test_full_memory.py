"""When Redis's memory is full, rights are kept and ended as usual; only calls that add work are
refused, and entirely.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis
from redis.exceptions import ResponseError

from fleet.control import keys, scripts
from fleet.control.connect import connect
from fleet.control.outage import code_of
from fleet.core.ids import CLIENT, Epoch, WorkerId
from tests.control_plane import (
    GATEWAY,
    OTHER,
    REQUEST,
    STAGE,
    WORKER,
    Control,
)
from tests.support import RedisProcess


@pytest.fixture
def control(server: RedisProcess) -> Iterator[Control]:
    """A control plane on its own Redis, with one request whose task a worker runs."""
    with connect(server.url) as client:
        yield Control(client).begin()


@contextmanager
def full_memory(client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


def keep_and_end(control: Control, epoch: Epoch) -> list[str]:
    """Renew a lease, acknowledge, lead and fence, then look for overdue grants and claim the lost
    task; return the scripts' answers.
    """
    answers = [
        control.renew(),
        control.renew(GATEWAY),
        control.acknowledge(delivered=True),
        "ok"
        if control.run(scripts.lead(WorkerId("conductor@test"), control.leader, 60_000))
        == control.leader
        else "lost",
    ]
    control.depose()
    answers += [control.register(OTHER), control.leave(died=True)]
    answers.append(control.watch())
    return [*answers, control.claim(control.epoch(), OTHER), control.drain(OTHER)]


def test_rights_are_kept_and_ended_with_a_full_memory(control: Control) -> None:
    epoch = control.own()
    assert control.append(epoch) == "ok"
    with full_memory(control.client):
        assert keep_and_end(control, epoch) == ["ok"] * 9


def test_operators_orders_are_accepted_with_a_full_memory(control: Control) -> None:
    epoch = control.own()
    with full_memory(control.client):
        orders = [scripts.order(WORKER, "drain"), scripts.redeliver(REQUEST, STAGE, epoch)]
        assert [control.run(order) for order in orders] == ["ok", "ok"]


ENDS_AND_MOVES: dict[str, Callable[[Control, Epoch], scripts.Call]] = {
    "abandon": lambda control, _: scripts.abandon(control.leader, 0),
    "abort": lambda _control, _: scripts.abort(REQUEST, scripts.API_RIGHT, "stop"),
    "lose_tasks": lambda _, epoch: scripts.lose_tasks([(REQUEST, STAGE, epoch)]),
    "detach": lambda control, _: scripts.detach(REQUEST, GATEWAY, control.epoch(CLIENT)),
    "attach": lambda control, _: scripts.attach(REQUEST, GATEWAY, held=control.epoch(CLIENT)),
}


@pytest.mark.parametrize("name", ENDS_AND_MOVES)
def test_work_ends_or_moves_with_a_full_memory(control: Control, name: str) -> None:
    epoch = control.own()
    with full_memory(control.client):
        assert control.run(ENDS_AND_MOVES[name](control, epoch)) == "ok"


def test_offered_blocks_are_released_with_a_full_memory(control: Control) -> None:
    assert control.hand_off(control.own()) == "ok"
    with full_memory(control.client):
        assert control.run(scripts.release(REQUEST, STAGE, WORKER)) == "ok"
    assert control.client.hget(keys.kv(REQUEST, STAGE), "data") == b""


def test_added_work_is_refused_as_a_whole_with_a_full_memory(control: Control) -> None:
    epoch = control.own()
    before = snapshot(control.client)
    with full_memory(control.client):
        for add in (
            lambda: control.submit("req-2"),
            lambda: control.restore("req-2"),
            lambda: control.append(epoch),
            lambda: control.hand_off(epoch),
        ):
            with pytest.raises(ResponseError) as refused:
                add()
            assert code_of(refused.value) == "OOM"
    assert snapshot(control.client) == before
    assert control.append(epoch) == "ok"


def snapshot(client: redis.Redis) -> dict[bytes, object]:
    """Return every key of Redis with its serialized value."""
    found: dict[bytes, object] = {key: client.dump(key) for key in client.scan_iter("*")}
    return found
