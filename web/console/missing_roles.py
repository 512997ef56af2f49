"""The sentence, shown on every page, about roles without a worker that accepts tasks: which roles
are missing, and which workers are starting.
"""

from collections.abc import Sequence

from fleet.core.ids import RoleName
from fleet.telemetry.condition import is_replaced, states_of
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
    notes = {role: states_of(role, workers, by_role.get(role)) for role in missing}
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
        if notes[role] and not is_replaced(role, workers, by_role.get(role))
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
