"""The tables of `fleet.conductor.states` are what the scripts enforce: no call changes a state in a
way that has no row, and no other place writes a state.
"""

import random
import re
from collections.abc import Callable

import pytest
import redis
from redis.exceptions import ResponseError

from fleet.conductor.states import REQUEST_MOVES, TASK_MOVES, Happened, RequestState, TaskState
from fleet.control import keys, lua_source, scripts
from fleet.control.connect import text
from fleet.core.ids import CLIENT, Walk
from tests.control_plane import (
    GATEWAY,
    OTHER,
    OTHER_GATEWAY,
    REQUEST,
    ROLE,
    STAGE,
    TEXT,
    WORKER,
    Control,
)

NUM_WALKS, NUM_CALLS = 20, 60
FOLLOWING = {
    before: {after for moves in TASK_MOVES.values() if (after := moves.get(before))}
    for before in TaskState
}
"""States that may follow each state by one move."""

CALLS: list[Callable[[Control], object]] = [
    lambda control: control.claim(),
    lambda control: control.claim(),
    lambda control: control.claim(worker=OTHER),
    lambda control: control.append(control.epoch(), num_produced(control)),
    lambda control: control.append(control.epoch(), num_produced(control), finish=True),
    lambda control: control.hand_off(control.epoch()),
    lambda control: control.lose_task(control.epoch()),
    lambda control: control.lose_tensors(),
    lambda control: control.redeliver(),
    lambda control: control.watch(),
    lambda control: control.run(
        scripts.park(
            REQUEST,
            STAGE,
            control.epoch(),
            [scripts.CreditWait(TEXT, CLIENT, num_produced(control))],
        )
    ),
    lambda control: control.acknowledge(num_produced(control)),
    lambda control: control.acknowledge(num_produced(control), delivered=True),
    lambda control: control.detach(GATEWAY, control.epoch(CLIENT)),
    lambda control: control.attach(OTHER_GATEWAY),
    lambda control: control.attach(GATEWAY),
    lambda control: (control.leave(died=True), control.register(WORKER)),
    lambda control: (control.fence(OTHER), control.register(OTHER)),
    lambda control: (control.leave(OTHER_GATEWAY), control.register(OTHER_GATEWAY, "")),
]
RARE: list[Callable[[Control], object]] = [
    lambda control: control.abort(),
    lambda control: control.fail(epoch=control.epoch()),
]


def num_produced(control: Control) -> int:
    return int(control.task().get(f"produced:{TEXT}", 0))


def states(control: Control) -> tuple[TaskState, TaskState, RequestState]:
    """Return the states of the task, of the client's task, and of the request."""
    request = text(control.client.hget(keys.request(REQUEST), "state"))
    own, client = (TaskState(control.task(stage).get("state", "")) for stage in (STAGE, CLIENT))
    return own, client, RequestState(request)


def reachable(before: TaskState) -> set[TaskState]:
    """Return the states that one script may leave: a task is lost and granted again by one."""
    return {
        before,
        *FOLLOWING[before],
        *(s for after in FOLLOWING[before] for s in FOLLOWING[after]),
    }


def test_every_change_of_a_state_has_a_row(control: Control) -> None:
    """Random calls of all scripts, in any order, change states only as the tables say."""
    seen: set[TaskState] = set()
    for seed in range(NUM_WALKS):
        chance = random.Random(seed)
        control.client.flushdb()
        control.begin()
        for worker, role in ((OTHER, ROLE), (OTHER_GATEWAY, "")):
            control.register(worker, role)
        before = states(control)
        for _ in range(NUM_CALLS):
            chance.choice(CALLS * 4 + RARE)(control)
            after = states(control)
            for one, other in zip(before[:2], after[:2], strict=True):
                assert other in reachable(one), f"{one} became {other}"
            assert after[2] in {before[2], *REQUEST_MOVES[before[2]]}
            seen |= set(after[:2])
            before = after
    assert seen >= set(TaskState) - {TaskState.NEW}


@pytest.mark.parametrize("happened", Happened)
def test_move_without_a_row_is_refused_and_changes_nothing(
    control: Control, happened: Happened
) -> None:
    """`move` in `lua/common`, which writes every state of a task, refuses what the table lacks."""
    key = keys.task(REQUEST, STAGE)
    for before in set(TaskState) - {TaskState.NEW}:
        control.client.hset(key, "state", before)
        after = TASK_MOVES[happened].get(before)
        script = lua_source.with_definitions(f"move('{key}', '{REQUEST}', '{STAGE}', '{happened}')")
        if after is None:
            with pytest.raises((ResponseError, redis.RedisError), match=f"cannot be {happened}"):
                control.client.eval(script, 0)
        else:
            control.client.eval(script, 0)
        assert control.task()["state"] == (after or before)


def test_states_are_written_by_move_and_set_state_only() -> None:
    """No other call of a script writes the field `state` of a task or a request."""
    inner = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
    key = r"(?:\w*task|\w*request_key|task_key\([^()]*\)|PREFIX \.\. 'req:'[^,]*)"
    writes = re.compile(rf"call\(\s*'H(?:SET|MSET|SETNX|DEL)',\s*{key},{inner}'state'{inner}\)")
    found = {
        name: lines
        for name in (*scripts.SCRIPTS, *(f"common/{part}" for part in lua_source.COMMON))
        if (lines := writes.findall(lua_source.read(name)))
    }
    assert found == {
        "common/endings": ["call('HSET', request_key, 'state', state)"],
        "common/tasks": ["call('HSET', task, 'state', after, ...)"],
    }


def test_new_owner_of_the_lead_decides_the_boundaries_that_wait(control: Control) -> None:
    """A boundary at which the conductor decides a walk waits until it is decided, once."""
    boundary = text(control.client.xadd(keys.BOUNDARIES, {"e": b"{}"}))
    old = control.depose()

    def decide(leader: str, walk: str) -> str:
        call = scripts.set_walk(leader, boundary, REQUEST, STAGE, TEXT, 3, Walk(walk))
        return control.run(call)

    assert decide(old, "late") == "not_leader" and control.client.xlen(keys.BOUNDARIES) == 1
    assert [decide(control.leader, walk) for walk in ("first", "second")] == ["ok", "duplicate"]
    assert control.task()[f"walk:{TEXT}:3"] == "first"
    assert control.client.xlen(keys.BOUNDARIES) == 0
