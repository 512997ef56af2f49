"""Queues: what waits for each role and how long, and the dead letters. Knows no stage by name."""

from dataclasses import dataclass

from fleet.core.telemetry import DeadLetterView, Queue
from web.gateway import Gateway
from web.pages.frame import Frame, Query, colours, stream_path


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    view: Queue
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues(Frame):
    queues: tuple[QueueRow, ...] = ()
    letters: tuple[DeadLetterView, ...] = ()

    @property
    def num_pending(self) -> int:
        return sum(len(row.view.pending) for row in self.queues)


class QueuesPage:
    key = active = "queues"
    template = "queues.html"
    live = ("trouble", "queues", "pending", "letters")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._colours = colours(gateway.graph)

    def empty(self, query: Query) -> Queues:
        return Queues(title="Queues", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> Queues:
        telemetry = self._gateway.client.telemetry
        queues = await telemetry.queues()
        unserved = [queue.role for queue in queues if queue.queue_depth and not queue.workers]
        return Queues(
            title="Queues",
            stream=stream_path(self.key, {}),
            trouble=f"Tasks wait for {', '.join(unserved)}, and no worker serves it. Start one:" if unserved else "",
            remedy=f"fleet worker {unserved[0]}" if unserved else "",
            queues=tuple(QueueRow(view=queue, colour=self._colours.get(queue.stage, -1)) for queue in queues),
            letters=tuple(await telemetry.dead_letters()),
        )
