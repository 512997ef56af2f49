"""Invariants of the conductor's state. Tests check all of them; the driver checks changed requests
at every tick.
"""

from fleet.conductor.state import ConductorState, TaskState
from fleet.graphs import get_graph


def violations(state: ConductorState, checked: ConductorState | None = None) -> list[str]:
    """Return one sentence per broken invariant; empty if all hold. `checked`: an earlier state that
    was already checked; requests that have not changed since are skipped.
    """
    found: list[str] = []
    skipped = checked.requests if checked else {}
    for record in state.requests.values():
        if skipped.get(record.id) is record:
            continue
        expected = set(get_graph(record.graph).stages_for(record.outputs))
        if set(record.tasks) != expected:
            found.append(
                f"{record.id}: tasks {sorted(record.tasks)} are not the graph's {sorted(expected)}"
            )
        for task in record.tasks.values():
            if (task.state is TaskState.RUNNING) != (task.owner is not None):
                found.append(
                    f"{record.id}: {task.stage} is {task.state} and its owner is {task.owner}"
                )
            if task.state is TaskState.PENDING and task.epoch != 0:
                found.append(f"{record.id}: {task.stage} is pending at epoch {task.epoch}")
            if task.state is not TaskState.PENDING and task.epoch <= 0:
                found.append(f"{record.id}: {task.stage} is {task.state} without an epoch")
    return found
