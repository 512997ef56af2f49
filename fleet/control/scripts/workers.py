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
    """Register a worker or gateway. `replicas`: number of workers of the role that accept tasks; up
    to `standby` further workers are answered "standby" and must wait. `fields`: other fields of the
    process's record. Answers "exists" for a registered id; "skew" or "mismatch", with the reason,
    for a process that does not fit the registered ones.
    """
    joined = encode_event(WorkerJoined(worker=worker, role=role))
    return Call.of("register", worker, role, lease_us, joined, replicas, standby, fields)


@script
def renew(worker: WorkerId, lease_us: int, vitals: Mapping[str, int | str]) -> Call:
    """Renew a lease. `vitals`: statistics for the console that changed since the last renewal."""
    ...


@script
def leases() -> Call:
    """Read the leases of all listed processes. Answers Redis's time (us), then for each process its
    id, and the deadline and duration of its lease (us). Writes nothing.
    """
    ...


@script
def lead(candidate: WorkerId, held: str, lease_ms: int) -> Call: ...


def fence_worker(
    leader: str, worker: WorkerId, *, deadline_us: int = 0, died: bool = False, cause: str = ""
) -> Call:
    """Revoke the rights of a worker or gateway. `leader`: fencing token of the conductor; "" if the
    process deregisters itself or, with `died`, if a supervisor saw it end. `cause`: signal or exit
    status.

    `deadline_us`: lease deadline that the conductor saw unrenewed for the whole duration of the
    lease. If the deadline is now another, the process is alive and is not fenced.
    """
    how = "lapsed" if leader else "died" if died else "left"
    left = WorkerLeft(worker=worker, how=how, cause=cause)
    return Call.of("fence_worker", leader, worker, encode_event(left), how, deadline_us)


@script
def fence_tasks(leader: str, worker: WorkerId) -> Call:
    """Take a limited number of the remaining tasks from a worker that `fence_worker` has fenced.
    Answers "more" until no task is left.
    """
    ...


@script
def drain(worker: WorkerId) -> Call:
    """Let a worker leave: it claims no more grants, and deregisters (`fence_worker`) once its tasks
    have ended.
    """
    ...


@script
def order(worker: WorkerId, action: WorkerOrder, by: str = "") -> Call:
    """Send an operator's order to a worker, by right of the API. A worker that is leaving cannot be
    resumed. `by`: name of the API key that orders it, for the journal.
    """
    ...


@script
def scale(role: RoleName, number: int, by: str = "") -> Call:
    """Order how many workers of a role accept tasks. Answers "ok"; or "unmanaged", without a write,
    if no `fleet up` runs that could start or stop workers. `by`: name of the API key that orders
    the number, for the journal.
    """
    ...


@script
def share_workers(
    supervisor: str, lease_us: int, roles: Sequence[tuple[RoleName, int, int]] = ()
) -> Call:
    """Renew the lease of a `fleet up` that starts and stops workers, and read how many workers of
    each role this `fleet up` is to run, its share. `lease_us`: 0 to end the lease. `roles`: name
    of each role, the configured number of workers, and the number that can run here.

    Answers for each role the number that an operator ordered ("" for none), and the share.
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
    """Announce that a worker of `role` is starting at `place` (host:pid), or renew the announcement
    for `lease_us`. `workers`: number of the role's workers in the deployment; None if unknown.

    Arguments from the starting worker: `instead_of`, the keeper whose announcement it continues;
    `loaded_percent`, the percentage of its weights that is loaded, None if unknown.
    Arguments from its keeper: `begins_us`, time until the process starts; `number`, count of the
    keeper's starts; `child`, the process once it runs; `instead_of`, the previous process;
    `stopped`, True if the previous process was stopped and did not fail.
    """
    ...


@script
def end_start(
    role: RoleName, place: str, *, child: str = "", took_us: int | None = None, failed: bool = False
) -> Call:
    """End the announcement of a start. `took_us`: time from the announcement until the worker
    joined; None if it did not join.

    `failed`: True if this counts as a failed start, False if the start was stopped. `child`: worker
    process that may continue a keeper's announcement.
    """
    ...


@script
def assume_served(since_us: int, roles: Sequence[RoleName]) -> Call:
    """Treat roles as served until `since_us`, the time at which Redis restarted and may have lost
    their workers' registrations.
    """
    ...


@script
def availability(grace_us: int, roles: Sequence[str]) -> Call:
    """Read the availability of roles. Answers for each role whether it admits new requests, whether
    it keeps running ones, its number of starting workers, and the percentage of weights that the
    most advanced starting worker has loaded (nothing if unknown). Writes nothing.
    """
    ...


@script
def queues(roles: Sequence[str]) -> Call:
    """Read the pending grants in the stream of each role. Writes nothing."""
    ...


@script
def log_fact(level: str, process: str, worker: str, stage: str, message: str) -> Call:
    """Add a line about a fact that no other script records to the fleet's log. `worker`, `stage`:
    labels of the line; "" for none.
    """
    ...


@script
def set_route(anchor: WorkerId, hops: Sequence[tuple[WorkerId, str]]) -> Call:
    """Record the route of an anchor, whose span workers then serve that anchor only. `hops`: each
    span worker with its span, in the order of the layers; empty to release the workers of the last
    route.

    Answers "ok" and the generation of the route, or a refusal.
    """
    ...


def note_gap(anchor: WorkerId, gap: str, losses: Mapping[WorkerId, str] | None = None) -> Call:
    """Record the layers that an anchor's route lacks. `gap`: description of the layers; "" if no
    layer is missing.

    `losses`: span workers of the route whose layers the others cannot take over, each with the
    reason; other span workers may leave. With None, each needs an unused worker as replacement.
    """
    return Call.of("note_gap", anchor, gap, None if losses is None else json.dumps(losses))


@script
def note_standby(anchor: WorkerId, worker: WorkerId, span: str) -> Call:
    """Record the layers that an unused span worker has loaded to stand by for an anchor's route."""
    ...
