"""Calls of the scripts that write processes: registration, leases, leadership, starts, routes."""

import json
from collections.abc import Mapping, Sequence

from fleet.control.scripts.calls import Call, script
from fleet.core.events import WorkerJoined, WorkerLeft, encode_event
from fleet.core.ids import RoleName, WorkerId
from fleet.telemetry.views import WorkerOrder


def register(
    worker: WorkerId,
    role: str,
    lease_us: int,
    fields: dict[str, str | bytes],
    *,
    replicas: int = 1,
    standby: int = 0,
) -> Call:
    """Register a process. If `replicas` workers of the role accept tasks, up to `standby` more
    receive the answer "standby" and must wait.
    """
    joined = encode_event(WorkerJoined(worker=worker, role=role))
    return Call.of("register", worker, role, lease_us, joined, replicas, standby, fields)


@script
def renew(worker: WorkerId, lease_us: int, vitals: Mapping[str, int | str]) -> Call:
    """Renew a lease. `vitals`: statistics for the console that changed since the last renewal."""
    ...


@script
def leases() -> Call:
    """Read only: Redis's time (us), then for each listed process its id and the deadline and
    duration of its lease (us).
    """
    ...


@script
def lead(candidate: WorkerId, held: str, lease_ms: int) -> Call: ...


def fence_worker(
    leader: str, worker: WorkerId, *, deadline_us: int = 0, died: bool = False, cause: str = ""
) -> Call:
    """`leader` is "" if the worker deregisters or, with `died`, if a supervisor saw its process end
    by `cause`.

    `deadline_us`: the lease deadline that the leader saw unrenewed for the duration of the lease;
    with another deadline, the worker is alive.
    """
    left = WorkerLeft(
        worker=worker, how="lapsed" if leader else "died" if died else "left", cause=cause
    )
    is_dead = died or bool(leader)
    return Call.of("fence_worker", leader, worker, encode_event(left), is_dead, deadline_us)


@script
def fence_tasks(leader: str, worker: WorkerId) -> Call:
    """Continue `fence_worker` with more of the tasks; the answer is "more" until none is left."""
    ...


@script
def drain(worker: WorkerId) -> Call:
    """Let the worker leave: it claims no more grants, and deregisters (`fence_worker`) once its
    tasks have ended.
    """
    ...


@script
def order(worker: WorkerId, action: WorkerOrder) -> Call:
    """Send an operator's order, by right of the API. A worker that is leaving accepts no order but
    to leave.
    """
    ...


@script
def announce_start(
    role: RoleName,
    place: str,
    lease_us: int,
    *,
    instead_of: str = "",
    child: str = "",
    workers: int | None = None,
    begins_us: int | None = None,
    number: int | None = None,
    stopped: bool = False,
    loaded_percent: int | None = None,
) -> Call:
    """Announce that a worker of `role` is starting at `place` (host:pid). `workers`: number of the
    role's workers in the deployment.

    From the worker's process: `instead_of` is the keeper whose announcement it continues, and
    `loaded_percent` the loaded part of its weights, None if unknown.
    From the keeper: `begins_us` is the time until the process starts, `number` counts the keeper's
    starts, `child` is the process once it runs, `instead_of` the process before, and `stopped`
    means that the process before was stopped and did not fail.
    """
    ...


@script
def end_start(
    role: RoleName, place: str, *, child: str = "", took_us: int | None = None, failed: bool = False
) -> Call:
    """End an announced start. `took_us`: time from the announcement until its worker joined.

    `failed`: it counts as a failed start; else it was stopped. From a keeper, `child` is the
    process that may continue it.
    """
    ...


@script
def assume_served(since_us: int, roles: Sequence[RoleName]) -> Call:
    """Treat roles as served until `since_us`, when Redis restarted and may have lost their
    workers.
    """
    ...


@script
def availability(grace_us: int, roles: Sequence[str]) -> Call:
    """Read only: for each role, whether it admits new requests and retains running ones, its number
    of starting workers, and the percentage of its weights that the most advanced of them has loaded
    (nothing if unknown).
    """
    ...


@script
def queues(roles: Sequence[str]) -> Call:
    """Read only: the pending grants of each role's stream."""
    ...


@script
def log_fact(level: str, process: str, worker: str, stage: str, message: str) -> Call:
    """Log a fact that no other script writes. `worker`, `stage`: labels of the line, "" for
    none.
    """
    ...


@script
def set_route(anchor: WorkerId, hops: Sequence[tuple[WorkerId, str]]) -> Call:
    """`hops`: each span worker and its span, in the order of the layers; without any, the workers
    of the last route are released.

    Answers "ok" and the generation, or a refusal.
    """
    ...


def note_gap(anchor: WorkerId, gap: str, losses: Mapping[WorkerId, str] | None = None) -> Call:
    """Record the layers that an anchor's route lacks; "" for none.

    `losses`: the reason why each span worker that must stay cannot leave; None if every span worker
    needs a replacement.
    """
    return Call.of("note_gap", anchor, gap, None if losses is None else json.dumps(losses))


@script
def note_standby(anchor: WorkerId, worker: WorkerId, span: str) -> Call:
    """Record the span that an unused worker has loaded to stand by."""
    ...
