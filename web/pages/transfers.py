"""Transfers: tensors between workers, by edge and by worker. Knows no transport."""

from dataclasses import dataclass

from fleet.core.ids import stage_of
from fleet.core.telemetry import EdgeTransfer, Transfers, WorkerTransfer
from web.gateway.gateway import Gateway
from web.pages.frame import Frame, Query, colours, stream_path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    view: WorkerTransfer
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersView(Frame):
    edges: tuple[EdgeTransfer, ...] = ()
    workers: tuple[WorkerEnd, ...] = ()


class TransfersPage:
    key = active = "transfers"
    template = "transfers.html"
    live = ("trouble", "edges", "workers")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._colours = colours(gateway.graph)

    def empty(self, query: Query) -> TransfersView:
        return self._built(Transfers(edges=(), workers=()))

    async def read(self, query: Query) -> TransfersView:
        return self._built(await self._gateway.client.telemetry.transfers())

    def _built(self, told: Transfers) -> TransfersView:
        return TransfersView(
            title="Transfers",
            stream=stream_path(self.key, {}),
            edges=told.edges,
            workers=tuple(WorkerEnd(view=end, colour=self._colours.get(stage_of(end.role), -1)) for end in told.workers),
        )
