"""The live status of the pipeline: whether speech is up, the stages with their workers, and one
request's edges with their counts. Knows no HTML.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId, RoleName, stage_of
from fleet.telemetry.condition import Evidence, missing_parts
from fleet.telemetry.trace import EdgeTrace, TaskTrace
from fleet.telemetry.views import RoleView, WorkerView
from web.console.pages.now import Remedy, find_remedy
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
class SpeechCondition:
    """Whether answers are spoken, by the rule of the Now page. `level`: "down" if they are refused,
    "waits" if they wait for a worker. `sentence`: the reason, "" if speech is up. `text_works`:
    True if answers without speech are admitted all the same.
    """

    level: Literal["up", "waits", "down"] = "up"
    sentence: str = ""
    text_works: bool = False
    remedy: Remedy = Remedy()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """Status of speech, of all stages, and of the shown request."""

    speech: SpeechCondition
    stages: tuple[StageCard, ...]
    request_id: str
    state: str

    @property
    def busy(self) -> bool:
        return bool(self.state) and self.state not in ENDED

    @property
    def line(self) -> str:
        """The state of the pipeline in a few words."""
        tasks = [(card.name, card.task) for card in self.stages if card.task is not None]
        active = [name for name, task in tasks if task.state not in ENDED]
        if active:
            return f"{', '.join(active)} at work"
        ready = sum(card.up > 0 for card in self.stages)
        count = len(self.stages) if ready == len(self.stages) else f"{ready} of {len(self.stages)}"
        return f"{count} stage{'' if count == 1 else 's'} ready"


async def read_pipeline_status(gateway: Gateway, request_id: RequestId | None) -> PipelineStatus:
    """Read the current status. `request_id`: request to show, None to show no request. If Redis is
    unreachable, speech is down, its sentence gives the error, and all counts are 0.
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
        workers, roles, request_id, request = list[WorkerView](), list[RoleView](), None, None
        speech = _down(gateway, error.message)
    else:
        workers = [view for view in listed if view.lease_left_s > 0]
        trouble = gateway.client.telemetry.redis_trouble()
        speech = _down(gateway, trouble) if trouble else _judge(gateway, missing, listed, roles)
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
        speech=speech, stages=tuple(cards), request_id=request_id or "", state=state
    )


def _judge(
    gateway: Gateway,
    missing: Sequence[RoleName],
    workers: Sequence[WorkerView],
    roles: Sequence[RoleView],
) -> SpeechCondition:
    refusing, waiting = missing_parts(
        Evidence(now_us=0, roles=roles, workers=workers, missing=missing)
    )
    if not refusing and not waiting:
        return SpeechCondition()
    text = "; ".join(part.text for part in refusing or waiting)
    writers = gateway.graph.stages_for(gateway.outputs(spoken=False))
    remedy = find_remedy(missing, dict.fromkeys(missing, 1), workers, roles, [])
    if not refusing:
        return SpeechCondition(level="waits", sentence=f"Answers wait: {text}.", remedy=remedy)
    return SpeechCondition(
        level="down",
        sentence=f"{_subject(gateway)} down: {text}.",
        text_works=not any(stage_of(role) in writers for role in missing),
        remedy=remedy,
    )


def _down(gateway: Gateway, reason: str) -> SpeechCondition:
    return SpeechCondition(level="down", sentence=f"{_subject(gateway)} down: {reason}")


def _subject(gateway: Gateway) -> str:
    return "Speech is" if gateway.speaks else "Answers are"


def _accepts_tasks(view: WorkerView) -> bool:
    return not view.draining and not view.standby
