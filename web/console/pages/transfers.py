"""Transfers: tensors between workers, by edge and by worker. Knows no transport."""

from dataclasses import dataclass

from fleet.core.ids import stage_of
from fleet.core.telemetry import EdgeTransfer, Transfers, WorkerTransfer
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
        return self._build(Transfers(edges=(), workers=()))

    async def read(self, query: Query) -> TransfersContext:
        return self._build(await self._gateway.client.telemetry.transfers())

    def _build(self, transfers: Transfers) -> TransfersContext:
        return TransfersContext(
            title="Transfers",
            stream=stream_path(self.key, {}),
            edges=transfers.edges,
            workers=tuple(
                WorkerTransferRow(view=end, colour=self._colours.get(stage_of(end.role), -1)) for end in transfers.workers
            ),
        )
