"""Transfers: tensors between workers, by edge and by worker. Knows no transport."""

from dataclasses import dataclass

from fleet.core.ids import stage_of
from fleet.core.telemetry import EdgeTransfer, Transfers, WorkerTransfer
from web.console.page_context import PageContext, Query, assign_colours, stream_path
from web.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTransferRow:
    view: WorkerTransfer
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersContext(PageContext):
    edges: tuple[EdgeTransfer, ...] = ()
    workers: tuple[WorkerTransferRow, ...] = ()


class TransfersPage:
    key = active = "transfers"
    path = "/transfers"
    template = "transfers.html"
    live = ("trouble", "edges", "workers")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._colours = assign_colours(gateway.graph)

    def empty(self, query: Query) -> TransfersContext:
        return self._built(Transfers(edges=(), workers=()))

    async def read(self, query: Query) -> TransfersContext:
        return self._built(await self._gateway.client.telemetry.transfers())

    def _built(self, told: Transfers) -> TransfersContext:
        return TransfersContext(
            title="Transfers",
            stream=stream_path(self.key, {}),
            edges=told.edges,
            workers=tuple(WorkerTransferRow(view=end, colour=self._colours.get(stage_of(end.role), -1)) for end in told.workers),
        )
