"""The Queues page: the tasks that wait for each role, the requests that wait for a place, and the
dead letters. Knows no stage by name.
"""

from dataclasses import dataclass

from fleet.telemetry.views import DeadLetterView, PendingGrant, RoleQueue, WaitingClient
from web.console.missing_roles import describe_missing
from web.console.page_context import LivePage, PageContext, Query

MAX_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesContext(PageContext):
    """Data of the Queues page. `pending` lists granted tasks that no worker has claimed, the oldest
    first, `letters` dead letters, and `clients` the clients whose requests wait for a place, each
    list up to `MAX_ROWS`. `num_pending`, `num_letters` and `num_clients` are the full numbers of
    rows, and `num_waiting` is the number of requests of all waiting clients.
    """

    queues: tuple[RoleQueue, ...] = ()
    clients: tuple[WaitingClient, ...] = ()
    num_clients: int = 0
    num_waiting: int = 0
    pending: tuple[PendingGrant, ...] = ()
    num_pending: int = 0
    letters: tuple[DeadLetterView, ...] = ()
    num_letters: int = 0


class QueuesPage(LivePage):
    key = active = "queues"
    path = "/queues"
    live = ("trouble", "queues", "clients", "pending", "letters")
    context = QueuesContext

    async def read(self, query: Query) -> QueuesContext:
        telemetry = self._gateway.client.telemetry
        queues = await telemetry.queues()
        letters = await telemetry.dead_letters()
        clients = await telemetry.waiting_clients()
        waiting = sorted(
            (grant for queue in queues for grant in queue.pending), key=lambda grant: -grant.age_s
        )
        unserved = [queue.role for queue in queues if queue.queue_depth and not queue.workers]
        trouble, remedy = describe_missing(
            unserved, await telemetry.workers() if unserved else [], queues
        )
        return QueuesContext(
            trouble=f"Tasks wait. {trouble}" if trouble else "",
            remedy=remedy,
            queues=tuple(queues),
            clients=tuple(clients[:MAX_ROWS]),
            num_clients=len(clients),
            num_waiting=sum(client.num_waiting for client in clients),
            pending=tuple(waiting[:MAX_ROWS]),
            num_pending=sum(max(queue.queue_depth, len(queue.pending)) for queue in queues),
            letters=tuple(letters[:MAX_ROWS]),
            num_letters=len(letters),
        )
