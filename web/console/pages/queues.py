"""Queues: the tasks that wait for each role, and the dead letters. Knows no stage by name."""

from dataclasses import dataclass, replace

from fleet.core.telemetry import DeadLetterView, PendingGrant, RoleQueue
from web.console.page_context import LivePage, PageContext, Query, stream_path

MAX_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    view: RoleQueue
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesContext(PageContext):
    """`pending`: grants with their stages' colours, the oldest first. `pending` and `letters` are limited to `MAX_ROWS`."""

    queues: tuple[QueueRow, ...] = ()
    pending: tuple[tuple[PendingGrant, int], ...] = ()
    num_pending: int = 0
    letters: tuple[DeadLetterView, ...] = ()
    num_letters: int = 0


class QueuesPage(LivePage):
    key = active = "queues"
    path = "/queues"
    live = ("trouble", "queues", "pending", "letters")

    def empty(self, query: Query) -> QueuesContext:
        return QueuesContext(title="Queues", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> QueuesContext:
        telemetry = self._gateway.client.telemetry
        queues = await telemetry.queues()
        letters = await telemetry.dead_letters()
        waiting = sorted((grant for queue in queues for grant in queue.pending), key=lambda grant: -grant.age_s)
        unserved = [queue.role for queue in queues if queue.queue_depth and not queue.workers]
        return replace(
            self.empty(query),
            trouble=f"Tasks wait for {', '.join(unserved)}, and no worker serves it. Start one:" if unserved else "",
            remedy=f"fleet worker {unserved[0]}" if unserved else "",
            queues=tuple(QueueRow(view=queue, colour=self._colours.get(queue.stage, -1)) for queue in queues),
            pending=tuple((grant, self._colours.get(grant.stage, -1)) for grant in waiting[:MAX_ROWS]),
            num_pending=sum(max(queue.queue_depth, len(queue.pending)) for queue in queues),
            letters=tuple(letters[:MAX_ROWS]),
            num_letters=len(letters),
        )
