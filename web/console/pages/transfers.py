"""Transfers: tensors between workers, by edge and by worker. Knows no transport."""

from dataclasses import dataclass, replace

from fleet.core.ids import stage_of
from fleet.core.telemetry import EdgeTransfer, WorkerTransfer
from web.console.page_context import LivePage, PageContext, Query, stream_path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTransferRow:
    view: WorkerTransfer
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersContext(PageContext):
    edges: tuple[EdgeTransfer, ...] = ()
    workers: tuple[WorkerTransferRow, ...] = ()


class TransfersPage(LivePage):
    key = active = "transfers"
    path = "/transfers"
    live = ("trouble", "edges", "workers")

    def empty(self, query: Query) -> TransfersContext:
        return TransfersContext(title="Transfers", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> TransfersContext:
        transfers = await self._gateway.client.telemetry.transfers()
        rows = (WorkerTransferRow(view=end, colour=self._colours.get(stage_of(end.role), -1)) for end in transfers.workers)
        return replace(self.empty(query), edges=transfers.edges, workers=tuple(rows))
