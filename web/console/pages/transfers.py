"""The Transfers page: tensor reads between workers, by edge and by worker. Knows no transport."""

from dataclasses import dataclass

from fleet.telemetry.views import EdgeFlow, EdgeTransfer, WorkerTransfer
from web.console.page_context import LivePage, PageContext, Query


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersContext(PageContext):
    flows: tuple[EdgeFlow, ...] = ()
    edges: tuple[EdgeTransfer, ...] = ()
    workers: tuple[WorkerTransfer, ...] = ()


class TransfersPage(LivePage):
    key = active = "transfers"
    path = "/transfers"
    live = ("trouble", "flows", "edges", "workers")
    context = TransfersContext

    async def read(self, query: Query) -> TransfersContext:
        transfers = await self._gateway.client.telemetry.transfers()
        return TransfersContext(
            flows=transfers.flows, edges=transfers.edges, workers=transfers.workers
        )
