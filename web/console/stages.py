"""The stages of the pipeline as the Now page summarises them: workers, load and queue of each.
Knows no stage by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.core.ids import RoleName, stage_of
from fleet.telemetry.views import RoleQueue, RoleView, SeriesPoint, WorkerView
from web.console import formats
from web.console.charts import find_last
from web.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """A stage of the pipeline. `up`, `standby`, `starting` and `draining` count its workers in
    these states, `draining` the workers that accept no more tasks; `wanted` counts those that
    should be up. `loaded_percent` is the percentage of the weights that the most advanced
    starting worker has loaded; None if unknown. `waiting` counts tasks, `oldest_s` is the longest
    wait among them. `resources` is a text about memory and load of all its workers; those that only
    compute layers for others count in it alone.

    `p50_ms` and `p95_ms` are durations of tasks, as last measured at `at_us`; None without a
    measurement.
    """

    name: str
    up: int
    wanted: int
    standby: int
    starting: int
    loaded_percent: int | None
    draining: int
    running: int
    capacity: int
    waiting: int
    oldest_s: float
    p50_ms: float | None
    p95_ms: float | None
    at_us: int
    resources: str

    @property
    def absent(self) -> bool:
        """True if no worker of the stage is up, on standby, starting or draining."""
        return not (self.up or self.standby or self.draining or self.starting)

    @property
    def full(self) -> bool:
        return 0 < self.capacity <= self.running


def wanted_workers(gateway: Gateway, roles: Sequence[RoleView]) -> dict[RoleName, int]:
    """Return how many workers of each role should accept tasks: the number that the present `fleet
    up` commands follow, else the configured one.
    """
    followed = {view.role: view.wanted for view in roles if view.managed}
    return {role.name: followed.get(role.name, role.replicas) for role in gateway.config.roles()}


def summarise_stages(
    gateway: Gateway,
    workers: Sequence[WorkerView],
    queues: Sequence[RoleQueue],
    series: Sequence[SeriesPoint],
) -> tuple[StageSummary, ...]:
    """Return the summary of each stage, in the order of the graph. `workers`: present workers."""
    at_us, wanted = [point.at_us for point in series], wanted_workers(gateway, queues)
    found: list[StageSummary] = []
    for stage in gateway.graph.stages:
        name = stage.name
        roles = [role.name for role in gateway.config.roles_of(name) if not role.hosts_spans]
        present = [view for view in workers if stage_of(view.role) == name and view.state != "late"]
        serving = [view for view in present if view.role in roles]
        waiting = [queue for queue in queues if queue.stage == name]
        p50_ms, p50_at = find_last([point.task_p50_ms.get(name) for point in series], at_us)
        summary = StageSummary(
            name=name,
            up=sum(1 for view in serving if view.state == "ready"),
            wanted=sum(wanted[role] for role in roles),
            standby=sum(1 for view in serving if view.state == "standby"),
            starting=sum(queue.starting for queue in waiting),
            loaded_percent=max(
                (queue.loaded_percent for queue in waiting if queue.loaded_percent is not None),
                default=None,
            ),
            draining=sum(1 for view in serving if view.state in ("draining", "leaving")),
            running=sum(view.running for view in serving),
            capacity=sum(view.capacity for view in serving if view.state == "ready"),
            waiting=sum(queue.queue_depth for queue in waiting),
            oldest_s=max((queue.oldest_s for queue in waiting), default=0.0),
            p50_ms=p50_ms,
            p95_ms=find_last([point.task_p95_ms.get(name) for point in series], at_us)[0],
            at_us=p50_at,
            resources=format_resources(present),
        )
        found.append(summary)
    return tuple(found)


def format_resources(workers: Sequence[WorkerView]) -> str:
    """Describe memory and load of a stage's workers together; "" before their first report."""
    on_gpu = [view for view in workers if view.gpu]
    if on_gpu:
        busy = [view.gpu_percent for view in on_gpu if view.gpu_percent is not None]
        text = f"{formats.size(sum(view.gpu_own_bytes for view in on_gpu))} on GPU"
        return f"{text}, {max(busy)} % busy" if busy else text
    memory = sum(view.memory_bytes for view in workers)
    cores = sum(view.cpu_percent for view in workers) / 100
    return f"{formats.size(memory)}, {cores:.1f} cores" if memory else ""
