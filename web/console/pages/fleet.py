"""The first page of the room Fleet: the map of the stages and their edges, the numbers of workers
by role, and the conversations at each worker. Knows no stage by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.core.ids import RequestId
from fleet.telemetry.views import WorkerView
from web.console.fleet_map import MapStage, RoleNumbers, count_roles, map_stages
from web.console.missing_roles import describe_missing
from web.console.page_context import LivePage, PageContext, Query
from web.console.stages import summarise_stages
from web.gateway.fleet_metrics import GATEWAY_ROLE
from web.realtime.session_views import SessionView, read_views

MAX_ROWS, MAX_ANSWERS = 40, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """The live conversations of one process. `answers` are live answers at a worker, each with the
    state of the voice session that it belongs to, "" without one; `sessions` are the voice sessions
    of a gateway. `num_more` further answers or sessions are left out.
    """

    view: WorkerView
    answers: tuple[tuple[RequestId, str], ...]
    sessions: tuple[SessionView, ...]
    num_more: int

    @property
    def role(self) -> str:
        return self.view.role or GATEWAY_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext(PageContext):
    """Data of the page. `managed` is True if a `fleet up` starts and stops workers. `conversations`
    has a row for each process with live answers or voice sessions, at most `MAX_ROWS`; `num_more`
    further processes are left out.
    """

    stages: tuple[MapStage, ...] = ()
    roles: tuple[RoleNumbers, ...] = ()
    managed: bool = False
    conversations: tuple[ConversationRow, ...] = ()
    num_more: int = 0


class FleetPage(LivePage):
    key = active = "fleet"
    path = "/fleet"
    live = ("trouble", "map", "roles", "conversations")
    context = FleetContext

    async def read(self, query: Query) -> FleetContext:
        telemetry = self._gateway.client.telemetry
        workers, queues = await telemetry.workers(with_gone=True), await telemetry.queues()
        transfers, missing = await telemetry.transfers(), await telemetry.missing_roles()
        trouble, remedy = describe_missing(missing, workers, queues)
        present = [view for view in workers if not view.gone]
        rows = _conversations(present, await read_views(self._gateway))
        stages = summarise_stages(self._gateway, present, queues, await telemetry.series())
        return FleetContext(
            trouble=trouble,
            remedy=remedy,
            stages=map_stages(self._gateway.graph, stages, queues, transfers.flows),
            roles=count_roles(self._gateway, queues, workers),
            managed=any(queue.managed for queue in queues),
            conversations=tuple(rows[:MAX_ROWS]),
            num_more=len(rows[MAX_ROWS:]),
        )


def _conversations(
    workers: Sequence[WorkerView], sessions: Sequence[SessionView]
) -> list[ConversationRow]:
    spoken = {view.request_id: view.state for view in sessions if view.request_id}
    rows = [_row(view, spoken, sessions) for view in workers]
    return [row for row in rows if row.answers or row.sessions]


def _row(
    view: WorkerView, spoken: Mapping[str, str], sessions: Sequence[SessionView]
) -> ConversationRow:
    requests = list(dict.fromkeys(task.request for task in view.tasks))
    held = [each for each in sessions if each.gateway == view.id]
    return ConversationRow(
        view=view,
        answers=tuple((each, spoken.get(each, "")) for each in requests[:MAX_ANSWERS]),
        sessions=tuple(held[:MAX_ANSWERS]),
        num_more=len(requests[MAX_ANSWERS:]) + len(held[MAX_ANSWERS:]),
    )
