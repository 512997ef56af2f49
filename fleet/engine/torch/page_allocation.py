"""Allocation of pages for the next step: free pages first, then pages of cached prefixes, then
pages of the youngest request, which is computed again later.
"""

from typing import Generic

from fleet.core.ids import RequestId
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.prefix import PrefixCache
from fleet.engine.torch.program import TaskT
from fleet.engine.torch.scheduled import ScheduledRequest


class PageAllocator(Generic[TaskT]):
    """Allocates the pages of one pool. `requests`: all requests of the loop, the oldest first."""

    def __init__(
        self,
        pool: KVPool,
        cache: PrefixCache,
        requests: dict[RequestId, ScheduledRequest[TaskT]],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._requests = requests

    def allocate(self, scheduled: ScheduledRequest[TaskT], stop: int) -> bool:
        """Allocate pages for a request's positions up to `stop`, evicting other requests if
        necessary; return False if the request must wait. A new request waits until all its
        positions fit.
        """
        if not scheduled.table.pages and not self._has_room(scheduled):
            return False
        while not self._pool.grow(scheduled.table, stop):
            if self._cache.drop_oldest():
                continue
            victim = self._next_victim(scheduled)
            if victim is None or victim is scheduled:
                return False
            victim.evict(self._pool)
        return True

    def _has_room(self, scheduled: ScheduledRequest[TaskT]) -> bool:
        """Return True if all positions of a new request fit, at the cost of requests for hidden
        states if necessary, or if all requests with pages are paused, so that waiting would not
        help.
        """
        num_free = self._pool.num_free + self._cache.num_pages
        lacking = self._pool.pages_for(scheduled.task.num_rows) - num_free
        if lacking <= 0:
            return True
        holders = [other for other in self._requests.values() if other.table.pages]
        evictable = sum(
            len(other.table.pages) for other in holders if scheduled.comes_before(other)
        )
        return lacking <= evictable or all(other.paused for other in holders)

    def _next_victim(self, scheduled: ScheduledRequest[TaskT]) -> ScheduledRequest[TaskT] | None:
        """Return the request whose pages are taken for `scheduled`: a request for hidden states
        first, then a paused one (which waits for its client), then the youngest.
        """
        youngest_first = reversed(self._requests.values())
        holders = [
            other
            for other in youngest_first
            if other.table.pages and not other.comes_before(scheduled)
        ]
        return min(
            holders, key=lambda other: (not other.request.captured, not other.paused), default=None
        )
