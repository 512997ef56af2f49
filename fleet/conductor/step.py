"""`step(state, event) -> (state, commands)`: every decision of the conductor. Uses no Redis, clock
or sleep; idempotent.

An event whose epoch is lower than its task's record is late and changes nothing.
"""

from dataclasses import replace
from functools import singledispatch

from fleet.conductor.state import ENDED, ConductorState, RequestRecord, TaskRecord, TaskState
from fleet.conductor.transitions import Happened, next_state
from fleet.core import events as ev
from fleet.core.commands import AbandonRequest, Command, EndRequest, FenceWorker, GrantTask, SetWalk
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.graphs import get_graph

MAX_DEATHS = 2
"""Number of workers that may die over a task without progress before the task runs alone: until
then, another task of the batch may be the cause.

The scripts that grant lost tasks follow the same rule (`lose_owner` in `common.lua`).
"""
Decision = tuple[ConductorState, tuple[Command, ...]]


def step(state: ConductorState, event: ev.Event) -> Decision:
    """Apply one event; return the new state and the commands to run. Raises: TransitionError if the
    table of transitions has no row for the event.
    """
    return _decide(event, state)


@singledispatch
def _decide(event: ev.Event, state: ConductorState) -> Decision:
    """Return the state unchanged: the default for events that need no decision."""
    return state, ()


@_decide.register
def _(event: ev.RequestSubmitted, state: ConductorState) -> Decision:
    if event.request in state.requests:
        return state, ()
    stages = get_graph(event.graph).stages_for(event.outputs)
    tasks = {stage: TaskRecord(stage=stage) for stage in stages}
    record = RequestRecord(id=event.request, graph=event.graph, outputs=event.outputs, tasks=tasks)
    return state.with_request(record), ()


@_decide.register
def _(event: ev.TaskGranted, state: ConductorState) -> Decision:
    task = state.task(event.request, event.stage)
    remade = task is not None and task.state is TaskState.FINISHED and event.epoch > task.epoch
    return _move(state, event, Happened.REMADE if remade else Happened.GRANTED), ()


@_decide.register
def _(event: ev.TaskHandedOff, state: ConductorState) -> Decision:
    """Record the role to which the script has granted the task."""
    state = _move(state, event, Happened.GRANTED)
    task = _current_task(state, event)
    return state.with_task(event.request, replace(task, role=event.role)) if task else state, ()


@_decide.register
def _(event: ev.TaskClaimed, state: ConductorState) -> Decision:
    return _move(state, event, Happened.CLAIMED, owner=event.owner), ()


@_decide.register
def _(event: ev.TaskFinished, state: ConductorState) -> Decision:
    return _move(state, event, Happened.FINISHED), ()


@_decide.register
def _(event: ev.TaskFailed, state: ConductorState) -> Decision:
    state = _move(state, event, Happened.FAILED)
    return _fail(state, event.request, event.code, event.message, event.param)


@_decide.register
def _(event: ev.TaskLost, state: ConductorState) -> Decision:
    """Fail the request if its task killed several workers and ran alone on the last. Any other lost
    task was already granted again by the script.
    """
    task = state.task(event.request, event.stage)
    if task is None or event.epoch < task.epoch:
        return state, ()
    state = _move(state, event, Happened.LOST)
    if event.alone and event.deaths > MAX_DEATHS:
        message = (
            f"{event.deaths} workers of stage {event.stage} died over this request, the "
            "last one with no other task"
        )
        return _fail(state, event.request, "worker_lost", message, dead_stage=event.stage)
    lost = replace(
        state.requests[event.request].tasks[event.stage], alone=event.deaths >= MAX_DEATHS
    )
    return state.with_task(event.request, lost), ()


@_decide.register
def _(event: ev.ClientGone, state: ConductorState) -> Decision:
    if event.request not in state.requests:
        return state, ()
    return state, (AbandonRequest(request=event.request, client_epoch=event.epoch),)


@_decide.register
def _(event: ev.ChunkAppended, state: ConductorState) -> Decision:
    record = state.requests.get(event.request)
    if record is None or not event.boundary or event.producer_walk is None:
        return state, ()
    edge = get_graph(record.graph).edge(event.edge)
    walk = edge.consumer_walk(event.producer_walk, event.ordinal)
    if edge.target not in state.conductor_driven or walk is None:
        return state, ()
    command = SetWalk(
        request=event.request, stage=edge.target, edge=edge.name, from_index=event.index, walk=walk
    )
    return state, (command,)


@_decide.register
def _(event: ev.RequestEnded, state: ConductorState) -> Decision:
    return state.without(event.request), ()


@_decide.register
def _(event: ev.GrantOverdue, state: ConductorState) -> Decision:
    task = _current_task(state, event)
    if task is None or task.state is not TaskState.GRANTED:
        return state, ()
    return state, (_grant(state, event.request, task),)


@_decide.register
def _(event: ev.RoleDeserted, state: ConductorState) -> Decision:
    task = _current_task(state, event)
    if task is None or task.state is not TaskState.GRANTED:
        return state, ()
    role = granted_role(state, task)
    message = f"no worker serves the role {role}; start one with `fleet worker {role}`"
    return _fail(state, event.request, "overloaded", message)


@_decide.register
def _(event: ev.WorkerExpired, state: ConductorState) -> Decision:
    return state, (FenceWorker(worker=event.worker, deadline_us=event.deadline_us),)


def _grant(state: ConductorState, request: RequestId, task: TaskRecord) -> GrantTask:
    role = granted_role(state, task)
    return GrantTask(
        request=request, stage=task.stage, role=role, expected_epoch=task.epoch, alone=task.alone
    )


def granted_role(state: ConductorState, task: TaskRecord) -> RoleName:
    """Return the role to which the task was last granted, or the first role of its stage."""
    return task.role or state.first_roles.get(task.stage, RoleName(task.stage))


def _current_task(state: ConductorState, event: ev.TaskEvent) -> TaskRecord | None:
    """Return the task of an event; None if its epoch is not the event's."""
    task = state.task(event.request, event.stage)
    return task if task is not None and task.epoch == event.epoch else None


def _move(
    state: ConductorState, event: ev.TaskEvent, happened: Happened, owner: WorkerId | None = None
) -> ConductorState:
    task = state.task(event.request, event.stage)
    if task is None or event.epoch < task.epoch:
        return state
    moved = replace(
        task, state=next_state(task.state, happened), epoch=event.epoch, owner=owner or task.owner
    )
    if moved.state in ENDED or moved.state is TaskState.GRANTED:
        moved = replace(moved, owner=None)
    return state.with_task(event.request, moved)


def _fail(
    state: ConductorState,
    request: RequestId,
    code: str,
    message: str,
    param: str | None = None,
    dead_stage: StageName | None = None,
) -> Decision:
    record = state.requests.get(request)
    if record is None or record.ending:
        return state, ()
    end = EndRequest(
        request=request,
        state="failed",
        code=code,
        message=message,
        param=param,
        dead_stage=dead_stage,
    )
    return state.with_request(replace(record, ending=True)), (end,)
