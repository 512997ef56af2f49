"""The sentence, shown on every page, about roles without a worker that accepts tasks: which roles
are missing, and which workers are starting.
"""

from collections.abc import Sequence

from fleet.core.ids import RoleName
from fleet.telemetry.views import RoleView, WorkerView


def describe_missing(
    missing: Sequence[RoleName], workers: Sequence[WorkerView], roles: Sequence[RoleView]
) -> tuple[str, str]:
    """Return the sentence about the `missing` roles, and the command that starts a worker, "" if no
    worker must be started.

    If a missing role has a worker that is starting, on standby, draining or late, the sentence
    describes this worker.
    """
    by_role = {role.role: role for role in roles}
    notes = {role: _states_of(role, workers, by_role.get(role)) for role in missing}
    absent = [role for role in missing if not notes[role]]
    present = [f"{role} ({notes[role]})" for role in missing if notes[role]]
    named = [
        f"{role} ({gap})" if (gap := by_role[role].gap if role in by_role else "") else str(role)
        for role in absent
    ]
    sentences = [f"No worker accepts new tasks for {', '.join(present)}."] if present else []
    sentences += [f"No worker for {', '.join(named)}."] if named else []
    # Nothing else replaces a worker that drains or is late.
    alone = [
        role
        for role in missing
        if notes[role] and not _is_replaced(role, workers, by_role.get(role))
    ]
    drains = [
        role
        for role in alone
        if any(view.role == role and view.state == "draining" for view in workers)
    ]
    needed = absent or alone
    if needed:
        sentences.append("Resume it, or start one:" if not absent and drains else "Start one:")
    return " ".join(sentences), f"fleet worker {needed[0]}" if needed else ""


def _states_of(role: RoleName, workers: Sequence[WorkerView], view: RoleView | None) -> str:
    states = [worker.state for worker in workers if worker.role == role and not worker.gone]
    loaded = (
        f", {view.loaded_percent} % loaded"
        if view is not None and view.loaded_percent is not None
        else ""
    )
    counts = {
        f"starting{loaded}": view.starting if view is not None else 0,
        "standing by": states.count("standby"),
        "draining": states.count("draining"),
        "leaving": states.count("leaving"),
        "not renewing its lease": states.count("late"),
    }
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _is_replaced(role: RoleName, workers: Sequence[WorkerView], view: RoleView | None) -> bool:
    """Return True if a starting or standby worker of the role will accept tasks without an
    operator's help.
    """
    starts = view is not None and view.starting > 0
    return starts or any(worker.role == role and worker.state == "standby" for worker in workers)
