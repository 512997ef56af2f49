"""The conductor decides by a pure function of its state and one event: every order of events leads
to the same end, and a repeated event changes nothing.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from fleet.conductor.invariants import violations
from fleet.conductor.state import ConductorState, TaskState
from fleet.conductor.step import step
from fleet.conductor.transitions import TABLE, Happened, next_state
from fleet.core import events as ev
from fleet.core.commands import AbandonRequest, Command, EndRequest, FenceWorker, GrantTask, SetWalk
from fleet.core.errors import TransitionError
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.graphs import get_graph

R = RequestId("r")
GRAPH = get_graph("qwen3_omni")
OUTPUTS = (EdgeName("audio"),)
STAGES = GRAPH.stages_for(OUTPUTS)
FIRST, SECOND = STAGES[:2]
SUBMITTED = ev.RequestSubmitted(request=R, graph=GRAPH.name, outputs=OUTPUTS)


def granted(stage: StageName, epoch: int) -> ev.Event:
    return ev.TaskGranted(request=R, stage=stage, epoch=Epoch(epoch))


def claimed(stage: StageName, epoch: int) -> ev.Event:
    return ev.TaskClaimed(request=R, stage=stage, epoch=Epoch(epoch), owner=WorkerId("w"))


def finished(stage: StageName, epoch: int) -> ev.Event:
    return ev.TaskFinished(request=R, stage=stage, epoch=Epoch(epoch))


def lost(epoch: int, *, deaths: int, alone: bool = False) -> ev.Event:
    return ev.TaskLost(request=R, stage=SECOND, epoch=Epoch(epoch), deaths=deaths, alone=alone)


def running(stage: StageName, *more: ev.Event) -> ConductorState:
    """Return the conductor's state in which `stage` runs since epoch 5, after the events in
    `more`.
    """
    return step_all([SUBMITTED, granted(stage, 5), claimed(stage, 5), *more])[0]


def step_all(
    events: Iterable[ev.Event], state: ConductorState | None = None
) -> tuple[ConductorState, list[Command]]:
    state = state or ConductorState()
    commands: list[Command] = []
    for event in events:
        state, more = step(state, event)
        commands += more
        assert violations(state) == []
    return state, commands


def ends(commands: Iterable[Command]) -> list[tuple[str, str, str, StageName | None]]:
    """Return how the commands end requests: state, code, message, and the stage that kills its
    workers.
    """
    return [
        (c.state, c.code, c.message, c.dead_stage) for c in commands if isinstance(c, EndRequest)
    ]


def test_life_of_a_request_needs_no_command_in_any_order() -> None:
    """In any order of events, the conductor sends no command for an undisturbed request: scripts
    grant its tasks and close it.
    """
    rng = random.Random(3)
    for _ in range(50):
        pending = [
            [life(stage, 10 + n) for life in (granted, claimed, finished)]
            for n, stage in enumerate(STAGES)
        ]
        events: list[ev.Event] = [SUBMITTED]
        while any(pending):
            events.append(rng.choice([life for life in pending if life]).pop(0))
        state, commands = step_all([*events, ev.RequestEnded(request=R, state="finished")])
        assert commands == [] and not state.requests


def test_repeated_event_produces_no_second_command() -> None:
    once = [
        SUBMITTED,
        granted(SECOND, 5),
        claimed(SECOND, 5),
        lost(9, deaths=3, alone=True),
        ev.RequestEnded(request=R, state="failed"),
    ]
    _, commands = step_all(once)
    assert step_all(event for event in once for _ in range(2))[1] == commands != []


def test_event_of_an_older_epoch_is_ignored() -> None:
    state = running(FIRST, granted(FIRST, 30))
    assert step(state, finished(FIRST, 5)) == (state, ())


def test_failed_task_fails_its_request_with_the_same_error() -> None:
    failed = ev.TaskFailed(request=R, stage=FIRST, epoch=Epoch(5), code="engine_error", message="?")
    _, commands = step_all([failed, failed], running(FIRST))
    assert ends(commands) == [("failed", "engine_error", "?", None)]


def test_request_of_a_lost_gateway_waits_for_another_and_is_then_aborted() -> None:
    state, waiting = step_all([SUBMITTED, ev.TaskLost(request=R, stage=CLIENT, epoch=Epoch(9))])
    assert waiting == []
    _, after = step(state, ev.ClientGone(request=R, epoch=Epoch(9)))
    assert after == (AbandonRequest(request=R, client_epoch=Epoch(9)),)


def test_lost_task_needs_no_command() -> None:
    """The conductor sends no command for a lost task: the script that took the task from its owner
    has granted it again.
    """
    state, commands = step_all([lost(9, deaths=1), granted(SECOND, 10)], running(SECOND))
    assert commands == [] and state.requests[R].tasks[SECOND].state is TaskState.GRANTED
    assert step(state, lost(9, deaths=1)) == (state, ())


def test_overdue_task_stays_alone_after_two_deaths_and_fails_after_a_death_alone() -> None:
    overdue = ev.GrantOverdue(request=R, stage=SECOND, epoch=Epoch(11))
    state = running(SECOND, lost(9, deaths=2), granted(SECOND, 11))
    state, commands = step_all([overdue], state)
    assert [c.alone for c in commands if isinstance(c, GrantTask)] == [True]
    state, _ = step_all([claimed(SECOND, 11)], state)
    assert ends(step(state, lost(20, deaths=3))[1]) == [], "others died with it"
    ((how, code, _, stage),) = ends(step(state, lost(20, deaths=3, alone=True))[1])
    assert (how, code, stage) == ("failed", "worker_lost", SECOND)


def test_finished_task_that_is_granted_again_finishes_again() -> None:
    """A finished task runs again if its tensors were lost, and finishes again. A repeated earlier
    event changes nothing.
    """
    state = running(FIRST, finished(FIRST, 5))
    assert step_all([granted(FIRST, 5)], state)[0] == state
    again, _ = step_all([granted(FIRST, 8)], state)
    assert again.requests[R].tasks[FIRST].state is TaskState.GRANTED
    again, _ = step_all([claimed(FIRST, 8), finished(FIRST, 8)], again)
    assert again.requests[R].tasks[FIRST].state is TaskState.FINISHED


def test_overdue_grant_is_repeated_unless_claimed() -> None:
    overdue = ev.GrantOverdue(request=R, stage=FIRST, epoch=Epoch(5))
    _, again = step_all([SUBMITTED, granted(FIRST, 5), overdue])
    assert [(c.stage, c.expected_epoch) for c in again if isinstance(c, GrantTask)] == [(FIRST, 5)]
    assert step(running(FIRST), overdue)[1] == ()


def test_grant_for_a_role_without_workers_fails_its_request_naming_the_role() -> None:
    """A grant for a role without workers fails its request. The error of a split stage names the
    role of the half that the task waits for; the stage's own name is not a role.
    """
    deserted = ev.RoleDeserted(request=R, stage=FIRST, epoch=Epoch(5))
    halves = (RoleName("a.prefill"), RoleName("a.decode"))
    state, _ = step_all(
        [SUBMITTED, granted(FIRST, 5)], ConductorState(first_roles={FIRST: halves[0]})
    )
    request = state.requests[R]
    tasks = {**request.tasks, FIRST: replace(request.tasks[FIRST], role=halves[1])}
    handed_off = state.with_request(replace(request, tasks=tasks))
    for waiting, role in ((state, halves[0]), (handed_off, halves[1])):
        ((how, code, message, _),) = ends(step(waiting, deserted)[1])
        assert (how, code) == ("failed", "overloaded") and f"`fleet worker {role}`" in message
    assert step(running(FIRST), deserted)[1] == ()


def test_worker_with_expired_lease_is_fenced() -> None:
    expired = ev.WorkerExpired(worker=WorkerId("w"), deadline_us=7)
    assert step(ConductorState(), expired)[1] == (FenceWorker(worker=WorkerId("w"), deadline_us=7),)


def test_conductor_sets_walks_only_on_conductor_driven_edges() -> None:
    edge = next(edge for edge in GRAPH.edges if edge.transitions)
    last = max(edge.transitions, key=lambda transition: transition.nth)
    appended = ev.ChunkAppended(
        request=R,
        edge=edge.name,
        index=7,
        boundary=True,
        producer_walk=last.producer_walk,
        ordinal=last.nth,
    )
    assert step_all([SUBMITTED, appended])[1] == []
    driven = ConductorState(conductor_driven=frozenset({edge.target}))
    _, commands = step_all([SUBMITTED, appended], driven)
    walks = [c for c in commands if isinstance(c, SetWalk)]
    assert [(c.stage, c.from_index, c.walk) for c in walks] == [(edge.target, 7, last.to)]


def test_missing_row_of_the_transition_table_raises() -> None:
    missing = [(s, h) for s in TaskState for h in Happened if (s, h) not in TABLE]
    assert (TaskState.FAILED, Happened.FINISHED) in missing
    for state, happened in missing:
        with pytest.raises(TransitionError):
            next_state(state, happened)
