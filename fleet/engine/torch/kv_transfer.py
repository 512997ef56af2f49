"""Hand-off of a request's keys and values between the batch loops of two processes: as a copy, or
by pages that the other process reads in place.
"""

import logging
from typing import Generic, cast

import torch

from fleet.core.ids import RequestId
from fleet.core.pages import Memory
from fleet.engine.capabilities import KVBlocks, KVPages
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.pass_queue import FAILURES
from fleet.engine.torch.prefix import PrefixCache
from fleet.engine.torch.program import TaskT
from fleet.engine.torch.scheduled import ScheduledRequest, failed

log = logging.getLogger(__name__)
LENDING_SHARE = 0.5
"""Share of the pool's pages that must be free before pages are lent: running requests need pages
more, and a hand-off works by a copy as well.
"""


class LoopKVTransfer(Generic[TaskT]):
    """Hand-offs of the requests of one batch loop. A request whose pages are lent is removed from
    the loop.
    """

    def __init__(
        self,
        pool: KVPool,
        cache: PrefixCache,
        requests: dict[RequestId, ScheduledRequest[TaskT]],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._requests = requests

    @property
    def pages(self) -> "LoopKVTransfer[TaskT]":
        return self

    @property
    def memory(self) -> Memory | None:
        return self._pool.memory

    def num_bytes(self, num_rows: int) -> int:
        return min(self._pool.pages_for(num_rows), self._pool.num_pages) * self._pool.page_bytes

    def export_blocks(self, request_id: RequestId) -> KVBlocks | None:
        scheduled = self._requests.get(request_id)
        if scheduled is None or not _can_share(scheduled):
            return None
        return KVBlocks(
            num_rows=scheduled.computed, data=self._pool.read(scheduled.table, scheduled.computed)
        )

    def may_lend(self) -> bool:
        room = self._pool.num_free + self._cache.num_pages
        return room >= LENDING_SHARE * self._pool.num_pages

    def lend(self, request_id: RequestId) -> KVPages | None:
        scheduled = self._requests.get(request_id)
        # Pages of a session's request are not lent: they are cached for its next turn.
        if (
            scheduled is None
            or scheduled.request.session
            or not self.may_lend()
            or not _can_share(scheduled)
        ):
            return None
        del self._requests[request_id]
        return KVPages(
            num_rows=scheduled.computed,
            at=self._pool.locate(scheduled.table),
            table=scheduled.table,
        )

    def reserve(self, num_rows: int) -> KVPages | None:
        table = self._pool.open_table()
        while not self._pool.grow(table, num_rows, clean=False):
            if not self._cache.drop_oldest():
                self._pool.close_table(table)
                return None
        return KVPages(num_rows=num_rows, at=self._pool.locate(table), table=table)

    def free(self, pages: KVPages) -> None:
        self._pool.close_table(cast(PageTable, pages.table))

    @torch.inference_mode()
    def import_pages(self, request_id: RequestId, pages: KVPages) -> bool:
        scheduled = self._importable(request_id, pages.num_rows)
        if scheduled is None:
            return False
        self._pool.close_table(scheduled.table)
        scheduled.table, scheduled.cached = cast(PageTable, pages.table), None
        _continue_after(scheduled, pages.num_rows)
        return True

    @torch.inference_mode()
    def import_blocks(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        scheduled = self._importable(request_id, blocks.num_rows)
        if scheduled is None or not self._write(scheduled, blocks):
            return False
        _continue_after(scheduled, blocks.num_rows)
        return True

    def _importable(self, request_id: RequestId, num_rows: int) -> ScheduledRequest[TaskT] | None:
        """Return the request if it can continue after `num_rows` imported positions: nothing of it
        is computed yet, and its rotary embeddings are scaled alike. Else return None.
        """
        scheduled = self._requests.get(request_id)
        if scheduled is None or scheduled.computed or _num_usable(scheduled, num_rows) <= 0:
            return None
        return scheduled if scheduled.task.rope_len(num_rows) == scheduled.rope_len else None

    def _write(self, scheduled: ScheduledRequest[TaskT], blocks: KVBlocks) -> bool:
        """Write copied keys and values as the request's first positions; return False if the pool
        has no room or the copy does not fit its pages.
        """
        try:
            if not self._pool.grow(scheduled.table, _num_usable(scheduled, blocks.num_rows)):
                return False
            fits = self._pool.write(scheduled.table, blocks.data, blocks.num_rows)
        except FAILURES:
            scheduled.evict(self._pool)  # its pages may be written partly
            raise
        if not fits:
            request = scheduled.request.request_id
            log.warning(
                "request %s: %d bytes are not %d rows of this pool (%s); they are computed here",
                request,
                len(blocks.data),
                blocks.num_rows,
                self._pool.layout,
                extra={"request_id": request},
            )
            scheduled.evict(self._pool)
        return fits


def _can_share(scheduled: ScheduledRequest[TaskT]) -> bool:
    """Return True if another engine could continue after the request's computed positions."""
    num_rows = scheduled.computed
    return num_rows > 0 and scheduled.task.rope_len(num_rows) == scheduled.rope_len


def _num_usable(scheduled: ScheduledRequest[TaskT], num_rows: int) -> int:
    """Return the number of imported positions that the request uses: all but the request's last
    position, which must be computed here to sample the next token.
    """
    return min(num_rows, scheduled.task.num_rows - 1)


def _continue_after(scheduled: ScheduledRequest[TaskT], num_imported: int) -> None:
    num_rows = _num_usable(scheduled, num_imported)
    scheduled.computed = num_rows
    scheduled.begun = num_rows
    scheduled.reported = num_rows
    try:
        scheduled.waiting += scheduled.task.on_computed(num_rows, num_rows, None)
    except FAILURES as error:
        scheduled.waiting.append(failed(scheduled, error))
