"""The fleet as a map: its stages in a line, the edges between them with their traffic, and the
numbers of workers by role. Knows no stage by name.

A map is a grid. A stage is in an odd column, an edge to the next stage in the column between them;
an edge that skips stages has a lane of its own below the stages, from its producer to its consumer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet.core.ids import CLIENT, StageName
from fleet.graphs import Graph
from fleet.telemetry.condition import DEATHS
from fleet.telemetry.views import MAX_REPLICAS, EdgeFlow, RoleQueue, WorkerView
from web.console.stages import StageSummary, wanted_workers
from web.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class MapLink:
    """The edges from one stage to another, or to the client. `first` and `last` are the columns
    that the link fills, `lane` its row of the grid: 1 between neighbours.
    """

    target: str
    first: int
    last: int
    lane: int
    flows: tuple[EdgeFlow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapStage:
    """A stage on the map with the links from it. `tasks_per_s` counts the tasks that its workers
    begin. `num_starved` counts its tasks that wait for credit of any consumer.
    """

    column: int
    summary: StageSummary
    tasks_per_s: float
    num_starved: int
    links: tuple[MapLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNumbers:
    """Numbers of one role's workers. `wanted`: workers that should accept tasks; `configured`:
    workers by the configuration; `dead`: workers that died in the last ten minutes. `is_free`: True
    if a person may order the number; `view.managed` tells whether a `fleet up` follows such an
    order.
    """

    view: RoleQueue
    wanted: int
    configured: int
    dead: int
    is_free: bool

    @property
    def unplaced(self) -> int:
        """Workers that are wanted, and that no `fleet up` runs or starts."""
        return max(0, self.wanted - self.view.placed) if self.view.managed else 0

    @property
    def most(self) -> int:
        return MAX_REPLICAS


def map_stages(
    graph: Graph,
    stages: Sequence[StageSummary],
    queues: Sequence[RoleQueue],
    flows: Sequence[EdgeFlow],
) -> tuple[MapStage, ...]:
    """Return the stages in the order of the graph. `flows`: traffic of the edges."""
    columns = {stage.name: 2 * number + 1 for number, stage in enumerate(stages)}
    columns[CLIENT] = 2 * len(stages) + 1
    lanes = iter(range(2, 2 + len(graph.edges)))
    return tuple(
        MapStage(
            column=columns[stage.name],
            summary=stage,
            tasks_per_s=sum(queue.out_per_s for queue in queues if queue.stage == stage.name),
            num_starved=sum(
                flow.num_waiting + flow.num_parked for flow in flows if flow.source == stage.name
            ),
            links=tuple(_links_from(StageName(stage.name), flows, columns, lanes)),
        )
        for stage in stages
    )


def _links_from(
    source: StageName,
    flows: Sequence[EdgeFlow],
    columns: dict[str, int],
    lanes: Iterator[int],
) -> Iterator[MapLink]:
    targets = dict.fromkeys(flow.target for flow in flows if flow.source == source)
    # the neighbour first, as a phone shows them in this order
    for target in sorted(targets, key=lambda name: columns[name]):
        is_next = columns[target] == columns[source] + 2
        yield MapLink(
            target=target,
            first=columns[source] + (1 if is_next else 0),
            last=columns[target] - (1 if is_next else 0),
            lane=1 if is_next else next(lanes),
            flows=tuple(f for f in flows if f.source == source and f.target == target),
        )


def count_roles(
    gateway: Gateway, queues: Sequence[RoleQueue], workers: Sequence[WorkerView]
) -> tuple[RoleNumbers, ...]:
    """Return the numbers of the configured roles. `workers`: present ones, and ones that
    ended in the last ten minutes.
    """
    wanted, of_role = wanted_workers(gateway, queues), {queue.role: queue for queue in queues}
    dead = Counter(view.role for view in workers if view.state in DEATHS)
    return tuple(
        RoleNumbers(
            view=of_role[role.name],
            wanted=wanted[role.name],
            configured=role.replicas,
            dead=dead[role.name],
            is_free=not role.optional and not role.hosts_spans,
        )
        for role in gateway.config.roles()
        if role.name in of_role
    )
