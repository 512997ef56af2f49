"""The live status of the pipeline: the stages with their workers, and one request's edges with
their counts. Knows no HTML.
"""

from dataclasses import dataclass

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId, stage_of
from fleet.telemetry.trace import EdgeTrace, TaskTrace
from fleet.telemetry.views import RoleView, WorkerView
from web.console.missing_roles import describe_missing
from web.gateway.gateway import Gateway

ENDED = frozenset({"finished", "failed", "aborted"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCard:
    """A stage in the pipeline's status. `up`, `draining`, `standby` and `starting` count its
    workers in these states; `up` workers accept tasks, and `capacity` counts their slots.

    `task` is the stage's task for the shown request, None without a shown request. `edges` are the
    edges from the stage with the shown request's counts, 0 without a shown request.
    """

    name: str
    up: int
    draining: int
    standby: int
    starting: int
    running: int
    capacity: int
    task: TaskTrace | None
    edges: tuple[EdgeTrace, ...]

    @property
    def absent(self) -> bool:
        """True if no worker of the stage is up, on standby, starting or draining."""
        return not (self.up or self.draining or self.standby or self.starting)

    @property
    def busy(self) -> bool:
        return self.running > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """Status of all stages, and of the shown request. `trouble` is the problem that an operator
    must solve first, "" without a problem.
    """

    stages: tuple[StageCard, ...]
    request_id: str
    state: str
    trouble: str

    @property
    def busy(self) -> bool:
        return bool(self.state) and self.state not in ENDED


async def read_pipeline_status(gateway: Gateway, request_id: RequestId | None) -> PipelineStatus:
    """Read the current status, with the request to show if `request_id` is not None. If Redis is
    unreachable, the status has this as its `trouble`.
    """
    graph = gateway.graph
    try:
        listed, missing = (
            await gateway.client.telemetry.workers(),
            await gateway.client.telemetry.missing_roles(),
        )
        roles = await gateway.client.telemetry.roles() if missing else []
        request = await gateway.client.telemetry.trace(request_id) if request_id else None
    except FleetError as error:
        workers, roles, request_id, request, trouble = (
            list[WorkerView](),
            list[RoleView](),
            None,
            None,
            error.message,
        )
    else:
        workers = [view for view in listed if view.lease_left_s > 0]
        trouble = gateway.client.telemetry.redis_trouble() or " ".join(
            filter(None, describe_missing(missing, listed, roles))
        )
    tasks = {task.stage: task for task in request.tasks} if request is not None else {}
    counts = {edge.name: edge for edge in request.edges} if request is not None else {}
    cards: list[StageCard] = []
    for stage in graph.stages:
        of_stage = [view for view in workers if stage_of(view.role) == stage.name]
        edges = [
            counts.get(edge.name)
            or EdgeTrace(
                name=edge.name,
                source=edge.source,
                target=edge.target,
                produced=0,
                consumed=0,
                items=0,
            )
            for edge in graph.edges_from(stage.name)
        ]
        card = StageCard(
            name=stage.name,
            up=sum(_accepts_tasks(view) for view in of_stage),
            draining=sum(view.draining for view in of_stage),
            standby=sum(view.standby and not view.draining for view in of_stage),
            starting=sum(role.starting for role in roles if stage_of(role.role) == stage.name),
            running=sum(view.running for view in of_stage),
            capacity=sum(view.capacity for view in of_stage if _accepts_tasks(view)),
            task=tasks.get(stage.name),
            edges=tuple(edges),
        )
        cards.append(card)
    state = request.state if request is not None else ""
    return PipelineStatus(
        stages=tuple(cards), request_id=request_id or "", state=state, trouble=trouble
    )


def _accepts_tasks(view: WorkerView) -> bool:
    return not view.draining and not view.standby
