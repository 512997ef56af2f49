"""A gateway that holds many answers is fenced in slices: a call is short, and the leader repeats it
until no answer is left.
"""

import pytest

from fleet.conductor.driver import Driver
from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.connect import connect, text
from fleet.core.events import TaskLost
from fleet.core.ids import CLIENT, RequestId, WorkerId
from tests.control_plane import (
    GATEWAY,
    OTHER_GATEWAY,
    WORKER,
    Control,
    num_commands,
)

NUM_HELD, MAX_COMMANDS = 150, 1000


@pytest.fixture
def held(control: Control) -> list[RequestId]:
    """Requests whose answers one gateway holds."""
    requests = [RequestId(f"req-held{number:03}") for number in range(NUM_HELD)]
    for request in requests:
        assert control.submit(request, bound=NUM_HELD + 8)[0] == "ok"
    return requests


def states_of(control: Control, requests: list[RequestId]) -> list[str]:
    return [text(control.client.hget(keys.task(request, CLIENT), "state")) for request in requests]


def continue_fencing(control: Control) -> int:
    """Fence the remaining slices as the leader; return the number of calls."""
    calls = 1
    while control.run(scripts.fence_tasks(control.leader, GATEWAY)) == "more":
        calls += 1
    return calls


def test_fencing_takes_few_tasks_per_call_and_ends_all_of_them(
    control: Control, held: list[RequestId]
) -> None:
    control.kill(GATEWAY)
    first = states_of(control, held).count("lost")
    assert 0 < first < NUM_HELD / 2
    assert control.renew(GATEWAY) == "unlisted", "its other rights end with the first call"
    assert control.attach(GATEWAY, request=held[0]) == "unlisted"
    assert 1 < continue_fencing(control) < NUM_HELD
    assert set(states_of(control, held)) == {"lost"}
    assert control.client.exists(keys.FENCING, keys.worker_tasks(GATEWAY)) == 0
    lost = [event.request for event in control.events_of(TaskLost)]
    assert sorted(lost) == sorted([*held, RequestId("req-1")]), "each is lost once"
    assert control.run(scripts.fence_tasks(control.leader, GATEWAY)) == "ok", (
        "a repeated call changes nothing"
    )


def test_deposed_leader_fences_no_further_tasks(control: Control, held: list[RequestId]) -> None:
    control.kill(GATEWAY)
    before = states_of(control, held)
    assert control.run(scripts.fence_tasks(control.depose(), GATEWAY)) == "not_leader"
    assert states_of(control, held) == before
    continue_fencing(control)
    assert set(states_of(control, held)) == {"lost"}


def test_request_attached_to_another_gateway_meanwhile_stays_there(
    control: Control, held: list[RequestId]
) -> None:
    control.kill(GATEWAY)
    remaining = next(
        request
        for request, state in zip(held, states_of(control, held), strict=True)
        if state == "running"
    )
    assert control.register(OTHER_GATEWAY, "") == "ok"
    assert control.attach(OTHER_GATEWAY, request=remaining) == "ok"
    continue_fencing(control)
    assert control.client.hget(keys.task(remaining, CLIENT), "owner") == OTHER_GATEWAY.encode()


@pytest.mark.parametrize("control", ["redis"], indirect=True)
def test_call_that_fences_a_gateway_is_short(control: Control, held: list[RequestId]) -> None:
    assert len(held) == NUM_HELD
    assert num_commands(control.client, scripts.fence_worker("", GATEWAY), "ok") < MAX_COMMANDS


@pytest.mark.parametrize("control", ["redis"], indirect=True)
def test_new_leader_continues_an_interrupted_fencing(
    control: Control, held: list[RequestId], redis_url: str
) -> None:
    """A gateway that left, or that its keeper fenced, still has answers: a new leader fences the
    rest, since no other process does.
    """
    control.leave(GATEWAY, died=True)
    control.client.delete(keys.CONDUCTOR)
    with connect(redis_url) as own_client:
        driver = Driver(
            load_config(None, ("engine=fake", "device=cpu", "graph=text")),
            own_client,
            WorkerId("conductor@new"),
        )
        for _ in range(NUM_HELD):
            driver.turn()
            if not control.client.exists(keys.FENCING):
                break
    assert set(states_of(control, held)) == {"lost"}


@pytest.mark.parametrize("control", ["redis"], indirect=True)
def test_fencing_a_worker_with_many_tasks_is_short(control: Control) -> None:
    for number in range(100):
        request = f"req-held{number:03}"
        assert control.submit(request, bound=200)[0] == "ok"
        assert control.claim(request=RequestId(request)) == "ok"
    assert num_commands(control.client, scripts.fence_worker("", WORKER, died=True), "ok") < 2000
    assert control.run(scripts.fence_tasks(control.leader, WORKER)) in ("more", "ok")
