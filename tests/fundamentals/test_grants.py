"""Scripts grant tasks: a submission its own, and a script that takes a task from its owner that
one, at a higher epoch.
"""

from collections.abc import Callable

import pytest

from fleet.conductor.step import MAX_DEATHS
from fleet.control import keys, scripts
from fleet.control.connect import run, text, texts
from fleet.core.events import Event, RequestSubmitted, TaskGranted, TaskHandedOff, TaskLost
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, StageName
from fleet.core.request import RequestSpec
from tests.fundamentals.control_plane import (
    GATEWAY,
    OTHER,
    REQUEST,
    ROLE,
    STAGE,
    TEXT,
    WORKER,
    Control,
)
from tests.fundamentals.test_worker_indexes import num_commands
from tests.support import stream_entries

HALVES = (RoleName("lm.prefill"), RoleName("lm.decode"))


def grants_of(control: Control, role: RoleName = ROLE) -> list[tuple[str, int, bool]]:
    """Return the grants in a role's queue: stage, epoch, alone."""
    entries = [fields for _, fields in stream_entries(control.client, keys.role(role))]
    return [(text(fields[b"s"]), int(fields[b"e"]), fields[b"a"] == b"1") for fields in entries]


def test_submission_grants_a_task_of_each_stage_to_its_first_role(control: Control) -> None:
    stages, roles = [StageName("lm"), StageName("voice")], [HALVES[0], RoleName("voice")]
    spec = RequestSpec(id=RequestId("req-two"), graph="text", prompt_ids=(1,), outputs=(TEXT,))
    call = scripts.submit(
        spec, None, bound=8, stages=stages, edges=[TEXT], gateway=GATEWAY, first_roles=roles
    )
    assert texts(run(control.client, call))[0] == "ok"
    granted = [event for event in control.events_of(TaskGranted) if event.request == spec.id]
    assert [event.stage for event in granted] == stages
    assert [grants_of(control, role) for role in roles] == [
        [(e.stage, e.epoch, False)] for e in granted
    ]
    assert control.events_of(RequestSubmitted)[-1].request == spec.id
    last = [type(event).__name__ for event in control.events_of(Event)][-3:]
    assert last == ["RequestSubmitted", "TaskGranted", "TaskGranted"], (
        "the conductor learns of the request first"
    )


def fenced_by_the_leader(control: Control) -> None:
    control.kill()


def seen_dying_by_its_keeper(control: Control) -> None:
    assert control.leave(died=True) == "ok"


def left(control: Control) -> None:
    assert control.leave() == "ok"


def failed_in_a_step(control: Control) -> None:
    assert control.run(scripts.lose_task(REQUEST, STAGE, control.epoch())) == "ok"


def redelivered(control: Control) -> None:
    assert control.run(scripts.redeliver(REQUEST, STAGE, Epoch(0))) == "ok"


LOSSES = (fenced_by_the_leader, seen_dying_by_its_keeper, left, failed_in_a_step, redelivered)


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_task_is_granted_again_by_the_script_that_loses_it(
    control: Control, lose: Callable[[Control], None]
) -> None:
    old = control.own()
    assert control.append(old) == "ok"
    lose(control)
    (lost,), granted = control.events_of(TaskLost), control.events_of(TaskGranted)[-1]
    assert old < lost.epoch < granted.epoch == control.epoch()
    assert grants_of(control) == [(STAGE, control.epoch(), False)]
    assert control.append(old, 1) == "stale"
    control.register(OTHER)
    assert (
        control.claim(control.epoch(), OTHER) == "ok" and control.append(control.epoch(), 1) == "ok"
    )


def test_lost_task_is_granted_to_its_last_role(control: Control) -> None:
    old = control.own()
    assert control.run(scripts.hand_off(REQUEST, STAGE, old, WORKER, HALVES[1])) == "ok"
    handed = control.events_of(TaskHandedOff)[-1].epoch
    assert grants_of(control, HALVES[1]) == [(STAGE, handed, False)]
    control.register(OTHER, HALVES[1])
    assert control.claim(handed, OTHER) == "ok"
    control.kill(OTHER)
    assert control.epoch() > handed and (STAGE, control.epoch(), False) in grants_of(
        control, HALVES[1]
    )


def test_task_runs_alone_after_two_deaths_and_is_left_lost_after_a_death_alone(
    control: Control,
) -> None:
    """The leader fails the request of the latter: `TaskLost` says that it died alone, and how
    often.
    """
    seen: list[tuple[str, bool]] = []
    for _ in range(MAX_DEATHS + 1):
        assert control.claim(control.epoch()) == "ok"
        control.kill()
        control.register(WORKER)
        seen.append((control.task()["state"], control.task()["alone"] == "1"))
    assert seen == [("granted", False), ("granted", True), ("lost", True)]
    last = control.events_of(TaskLost)[-1]
    assert last.alone and last.deaths == MAX_DEATHS + 1 and last.epoch == control.epoch()
    assert control.run(scripts.redeliver(REQUEST, STAGE, Epoch(0))) == "lost"


def test_lost_client_is_not_granted(control: Control) -> None:
    """Another gateway attaches, or the leader aborts the request."""
    assert control.run(scripts.detach(REQUEST, GATEWAY, control.epoch(CLIENT))) == "ok"
    assert control.task(CLIENT)["state"] == "lost"
    assert [event.stage for event in control.events_of(TaskGranted)] == [STAGE]


@pytest.mark.parametrize("control", ["redis"], indirect=True)
def test_fencing_a_worker_with_many_tasks_is_short(control: Control) -> None:
    for number in range(100):
        request = f"req-held{number:03}"
        assert control.submit(request, bound=200)[0] == "ok"
        epoch = Epoch(int(text(control.client.hget(keys.task(RequestId(request), STAGE), "epoch"))))
        assert (
            control.run(scripts.claim(WORKER, ROLE, "0-1", RequestId(request), STAGE, epoch))
            == "ok"
        )
    assert num_commands(control.client, scripts.fence_worker("", WORKER, died=True), "ok") < 2000
    assert control.run(scripts.fence_tasks(control.leader, WORKER)) in ("more", "ok")
