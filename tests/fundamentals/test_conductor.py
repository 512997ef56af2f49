"""The conductor's `step` is pure: every order of events leads to the same end, and a repeated event
changes nothing.
"""

import random
from dataclasses import replace

import pytest

from fleet.conductor.invariants import violations
from fleet.conductor.state import ConductorState, RequestRecord, TaskRecord, TaskState
from fleet.conductor.step import resume, step
from fleet.conductor.transitions import TABLE, Happened, next_state
from fleet.core import events as ev
from fleet.core.commands import AbandonRequest, Command, EndRequest, FenceWorker, GrantTask, SetWalk
from fleet.core.errors import TransitionError
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.graphs import get_graph

R = RequestId("r")
GRAPH = get_graph("qwen3_omni")
STAGES = GRAPH.stages_for((EdgeName("audio"),))


def submitted() -> ev.RequestSubmitted:
    return ev.RequestSubmitted(request=R, graph=GRAPH.name, outputs=(EdgeName("audio"),))


def task_events(stage: StageName, epoch: int) -> list[ev.Event]:
    e = Epoch(epoch)
    return [
        ev.TaskGranted(request=R, stage=stage, epoch=e),
        ev.TaskClaimed(request=R, stage=stage, epoch=e, owner=WorkerId(f"{stage}@1")),
        ev.TaskFinished(request=R, stage=stage, epoch=e),
    ]


def step_all(
    events: list[ev.Event], state: ConductorState | None = None
) -> tuple[ConductorState, list[Command]]:
    state = state or ConductorState()
    commands: list[Command] = []
    for event in events:
        state, more = step(state, event)
        commands += more
        assert violations(state) == []
    return state, commands


def test_life_of_a_request_needs_no_command_in_any_order() -> None:
    """The scripts grant its tasks and close it."""
    rng = random.Random(3)
    for _ in range(50):
        pending = [task_events(stage, 10 + i) for i, stage in enumerate(STAGES)]
        events: list[ev.Event] = [submitted()]
        while any(pending):
            events.append(rng.choice([task_life for task_life in pending if task_life]).pop(0))
        state, commands = step_all([*events, ev.RequestEnded(request=R, state="finished")])
        assert commands == [] and not state.requests


def test_repeated_event_produces_no_second_command() -> None:
    once = [
        submitted(),
        *task_events(STAGES[1], 5)[:2],
        lost(9, deaths=3, alone=True),
        ev.RequestEnded(request=R, state="failed"),
    ]
    _, commands = step_all(once)
    _, doubled = step_all([event for event in once for _ in range(2)])
    assert doubled == commands != []


def test_event_of_an_older_epoch_is_ignored() -> None:
    stage = STAGES[0]
    state, _ = step_all(
        [
            submitted(),
            *task_events(stage, 20)[:2],
            ev.TaskGranted(request=R, stage=stage, epoch=Epoch(30)),
        ]
    )
    late = ev.TaskFinished(request=R, stage=stage, epoch=Epoch(20))
    after, commands = step(state, late)
    assert after == state and commands == ()


def test_failed_task_fails_its_request_with_the_same_error() -> None:
    failed = ev.TaskFailed(
        request=R, stage=STAGES[0], epoch=Epoch(5), code="engine_error", message="NaN"
    )
    _, commands = step_all([submitted(), *task_events(STAGES[0], 5)[:2], failed, failed])
    ends = [c for c in commands if isinstance(c, EndRequest)]
    assert [(end.state, end.code, end.message) for end in ends] == [
        ("failed", "engine_error", "NaN")
    ]


def test_request_of_a_lost_gateway_waits_for_another_and_is_then_aborted() -> None:
    state, waiting = step_all([submitted(), ev.TaskLost(request=R, stage=CLIENT, epoch=Epoch(9))])
    assert waiting == []
    _, after_expiry = step_all([ev.ClientGone(request=R, epoch=Epoch(9))], state)
    assert after_expiry == [AbandonRequest(request=R, client_epoch=Epoch(9))]


def lost(epoch: int, *, deaths: int, alone: bool = False) -> ev.TaskLost:
    return ev.TaskLost(request=R, stage=STAGES[1], epoch=Epoch(epoch), deaths=deaths, alone=alone)


def test_lost_task_needs_no_command() -> None:
    """The script that took it from its owner has granted it again."""
    state, commands = step_all(
        [
            submitted(),
            *task_events(STAGES[1], 5)[:2],
            lost(9, deaths=1),
            task_events(STAGES[1], 10)[0],
        ]
    )
    assert commands == [] and state.requests[R].tasks[STAGES[1]].state is TaskState.GRANTED
    after, late = step(state, lost(9, deaths=1))
    assert after == state and late == ()


def test_overdue_task_stays_alone_after_two_deaths_and_fails_after_a_death_alone() -> None:
    stage = STAGES[1]
    state, _ = step_all([submitted(), *task_events(stage, 5)[:2], lost(9, deaths=2)])
    offered = ev.TaskGranted(request=R, stage=stage, epoch=Epoch(11))
    again, overdue = step_all(
        [offered, ev.GrantOverdue(request=R, stage=stage, epoch=Epoch(11))], state
    )
    assert [c.alone for c in overdue if isinstance(c, GrantTask)] == [True]
    running = ev.TaskClaimed(request=R, stage=stage, epoch=Epoch(11), owner=WorkerId("w"))
    _, after_shared_death = step_all([running, lost(20, deaths=3)], again)
    assert not [c for c in after_shared_death if isinstance(c, EndRequest)]
    _, after_death_alone = step_all([running, lost(20, deaths=3, alone=True)], again)
    assert [
        (c.state, c.code, c.dead_stage) for c in after_death_alone if isinstance(c, EndRequest)
    ] == [("failed", "worker_lost", stage)]


def test_finished_task_that_is_granted_again_finishes_again() -> None:
    """It recomputes tensors that were lost. An event from before changes nothing."""
    stage = STAGES[0]
    finished, _ = step_all([submitted(), *task_events(stage, 5)])
    assert step_all([task_events(stage, 5)[0]], finished)[0] == finished
    again, _ = step_all(task_events(stage, 8)[:1], finished)
    assert again.requests[R].tasks[stage].state is TaskState.GRANTED
    assert (
        step_all(task_events(stage, 8), finished)[0].requests[R].tasks[stage].state
        is TaskState.FINISHED
    )


def test_overdue_grant_is_repeated_unless_claimed() -> None:
    stage = STAGES[0]
    overdue = ev.GrantOverdue(request=R, stage=stage, epoch=Epoch(5))
    granted, _ = step_all([submitted(), task_events(stage, 5)[0]])
    _, again = step(granted, overdue)
    assert again == (
        GrantTask(request=R, stage=stage, role=again[0].role, expected_epoch=Epoch(5)),  # type: ignore[attr-defined]
    )
    claimed, _ = step_all([submitted(), *task_events(stage, 5)[:2]])
    assert step(claimed, overdue)[1] == ()


def test_grant_for_a_role_without_workers_fails_its_request() -> None:
    stage = STAGES[1]
    no_workers = ev.RoleDeserted(request=R, stage=stage, epoch=Epoch(5))
    granted, _ = step_all([submitted(), task_events(stage, 5)[0]])
    ends = [c for c in step(granted, no_workers)[1] if isinstance(c, EndRequest)]
    assert [(end.state, end.code) for end in ends] == [("failed", "overloaded")] and stage in ends[
        0
    ].message
    claimed, _ = step_all([submitted(), *task_events(stage, 5)[:2]])
    assert step(claimed, no_workers)[1] == ()


def test_error_for_a_missing_worker_names_its_role() -> None:
    """The role of a split stage is the half that the task waits for: the stage's own name is not a
    role there.
    """
    stage, halves = STAGES[0], (RoleName("a.prefill"), RoleName("a.decode"))
    no_workers = ev.RoleDeserted(request=R, stage=stage, epoch=Epoch(5))
    granted, _ = step_all(
        [submitted(), task_events(stage, 5)[0]], ConductorState(first_roles={stage: halves[0]})
    )
    task = replace(granted.requests[R].tasks[stage], role=halves[1])
    handed_off = granted.with_request(
        replace(granted.requests[R], tasks={**granted.requests[R].tasks, stage: task})
    )
    for state, role in ((granted, halves[0]), (handed_off, halves[1])):
        (end,) = [c for c in step(state, no_workers)[1] if isinstance(c, EndRequest)]
        assert f"`fleet worker {role}`" in end.message


def test_worker_with_expired_lease_is_fenced() -> None:
    expired = ev.WorkerExpired(worker=WorkerId("w"), deadline_us=7)
    assert step(ConductorState(), expired)[1] == (FenceWorker(worker=WorkerId("w"), deadline_us=7),)


def test_conductor_sets_walks_only_on_conductor_driven_edges() -> None:
    edge = next(edge for edge in GRAPH.edges if edge.transitions)
    last = max(edge.transitions, key=lambda t: t.nth)
    appended = ev.ChunkAppended(
        request=R,
        edge=edge.name,
        index=7,
        boundary=True,
        producer_walk=last.producer_walk,
        ordinal=last.nth,
    )
    _, silent = step_all([submitted(), appended])
    assert not [c for c in silent if isinstance(c, SetWalk)]
    driven = ConductorState(conductor_driven=frozenset({edge.target}))
    _, commands = step_all([submitted(), appended], driven)
    walks = [c for c in commands if isinstance(c, SetWalk)]
    assert [(c.stage, c.from_index, c.walk) for c in walks] == [(edge.target, 7, last.to)]


def test_new_leader_grants_pending_and_lost_tasks_of_an_older_version() -> None:
    state, _ = step_all(
        [
            submitted(),
            task_events(STAGES[0], 5)[0],
            *task_events(STAGES[1], 5)[:2],
            lost(9, deaths=2),
        ]
    )
    granted = [
        (c.stage, c.expected_epoch, c.alone) for c in resume(state, R) if isinstance(c, GrantTask)
    ]
    assert granted == [(STAGES[1], 9, True), *((stage, 0, False) for stage in STAGES[2:])]


def test_new_leader_resumes_no_request_that_must_end() -> None:
    state, _ = step_all(
        [submitted(), *task_events(STAGES[1], 5)[:2], lost(9, deaths=3, alone=True)]
    )
    assert resume(state, R) == resume(state, RequestId("unknown")) == ()


def test_new_leader_ends_a_complete_request_of_an_older_version() -> None:
    """If a task still runs, the script that ends it closes the request."""
    done = {s: TaskRecord(stage=s, state=TaskState.FINISHED, epoch=Epoch(3)) for s in STAGES}
    finished = RequestRecord(id=R, graph=GRAPH.name, outputs=(EdgeName("audio"),), tasks=done)
    _, commands = step_all(
        [ev.AnswerDelivered(request=R)] * 2, ConductorState().with_request(finished)
    )
    assert [c.state for c in commands if isinstance(c, EndRequest)] == ["finished"]
    running = replace(
        finished,
        tasks={
            **done,
            STAGES[0]: TaskRecord(stage=STAGES[0], state=TaskState.GRANTED, epoch=Epoch(5)),
        },
    )
    assert (
        step_all([ev.AnswerDelivered(request=R)], ConductorState().with_request(running))[1] == []
    )


def test_missing_row_of_the_transition_table_raises() -> None:
    missing = [(s, h) for s in TaskState for h in Happened if (s, h) not in TABLE]
    assert (TaskState.FAILED, Happened.FINISHED) in missing
    for state, happened in missing:
        with pytest.raises(TransitionError):
            next_state(state, happened)
