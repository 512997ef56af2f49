"""The batch loop of autoregressive stages: requests join and leave at any step; prompt chunks and decode rows share a pass.

Memory: pages are allocated as rows are computed. When they run out, cached prefixes are dropped first; then the youngest request
with pages is evicted and recomputed later from its rows (its draws stand). The oldest is never evicted, so the loop makes
progress. Knows no model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, cast

import torch

from fleet.core.errors import BadInput, FleetError, OutOfPages, failure_of
from fleet.core.ids import RequestId, Walk
from fleet.core.pages import Memory
from fleet.engine.base import NUM_POSITIONS, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats, KVBlocks, KVPages
from fleet.engine.torch.device import check_device
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import PassRunner
from fleet.engine.torch.prefix import CachedPrefix, PrefixCache, num_equal_keys
from fleet.engine.torch.program import Program, TaskT

log = logging.getLogger(__name__)
NO_WALK = Walk("")
LENDING_SHARE = 0.5
"""Share of the pool that must be free to lend pages: running requests come first, and a copy serves as well."""
FAILURES = (FleetError, RuntimeError, ValueError, IndexError, KeyError, MemoryError)
"""Errors that torch, numpy and programs raise for one request's data. Any other error is a bug, and handled by the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Units: `max_batch` requests per pass; `prefill_chunk_tokens` rows of one request per pass; `max_positions` of one request,
    if the program has fewer than the pool.
    """

    max_batch: int
    prefill_chunk_tokens: int
    max_positions: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest(Generic[TaskT]):
    """A request in the batch loop.

    Invariants: 0 <= computed <= task.num_rows; pages cover `computed` rows; rows below `reported` were reported to the task as
    computed. `cached`: the prefix of its session, whose pages it has, until a row differs from it.
    """

    request: EngineRequest
    task: TaskT
    table: PageTable
    computed: int = 0
    reported: int = 0
    paused: bool = False
    fed_final: bool = False
    walk: Walk = NO_WALK
    waiting: list[EngineOutput] = field(default_factory=list[EngineOutput])
    cached: CachedPrefix | None = None

    def can_step(self) -> bool:
        return not self.paused and (bool(self.waiting) or self.computed < self.task.num_rows)


class LMEngine(Engine, Generic[TaskT]):
    """One stage's batch loop. Not thread-safe."""

    def __init__(self, program: Program[TaskT], pool: KVPool, runner: PassRunner[TaskT], limits: LoopLimits) -> None:
        self.program, self.pool, self.limits, self._runner = program, pool, limits, runner
        self._requests: dict[RequestId, ScheduledRequest[TaskT]] = {}
        self._cache = PrefixCache(pool)
        self._rows_reused = 0

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if the whole pool could not hold it; BadInput."""
        if request.request_id in self._requests:
            raise BadInput(f"request {request.request_id} was submitted twice")
        most, pool_positions = int(request.params[NUM_POSITIONS]), self.pool.num_pages * self.pool.page_size
        capacity = min(pool_positions, self.limits.max_positions or pool_positions)
        if most > capacity:
            what = ", what its KV pool holds" if capacity == pool_positions else ""
            raise OutOfPages(
                f"max_tokens: This model's maximum context length is {capacity} tokens{what}. However, "
                f"you requested {most} tokens, prompt and answer. Please reduce the length of the messages or max_tokens.",
                param="max_tokens",
            )  # fmt: skip
        task = self.program.open(request)
        cached = self._cache.take(request.session)
        table = cached.table if cached is not None else self.pool.open_table()
        self._requests[request.request_id] = ScheduledRequest(request=request, task=task, table=table, cached=cached)

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        scheduled = self._requests.get(request_id)
        if scheduled is None:
            return 0
        assert not scheduled.fed_final, "input after the final one"
        scheduled.walk, scheduled.fed_final = piece.walk, piece.final
        try:
            with torch.inference_mode():
                scheduled.waiting += scheduled.task.feed(piece)
                return self._reuse_cached(scheduled, scheduled.cached) if scheduled.cached is not None else 0
        except FAILURES as error:
            scheduled.waiting.append(_failed(scheduled, error))
            return 0

    def _reuse_cached(self, scheduled: ScheduledRequest[TaskT], kept: CachedPrefix) -> int:
        """Count new rows as computed as far as they equal the session's prefix; return how many.

        The last row is always computed: the next draw, or the end, needs it.
        """
        task, before = scheduled.task, scheduled.computed
        known = task.prefix().keys[: task.num_rows - (task.wants_draw or scheduled.fed_final)]
        scheduled.computed = num_equal_keys(known, kept.prefix.keys)
        if scheduled.computed < task.num_rows or scheduled.computed == len(kept.prefix.keys):
            scheduled.cached = None
            self.pool.shrink(scheduled.table, scheduled.computed)
        if scheduled.computed > before:
            task.on_reused(kept.prefix, before, scheduled.computed)
            self._report_whole_chunks(scheduled)
        self._rows_reused += scheduled.computed - before
        return scheduled.computed - before

    def _report_whole_chunks(self, scheduled: ScheduledRequest[TaskT]) -> None:
        """Report reused rows in the chunks in which they would have been computed, as an engine without the prefix does that
        continues the request. An incomplete chunk is reported with its rest.
        """
        size = self.limits.prefill_chunk_tokens
        while scheduled.reported + size <= scheduled.computed:
            scheduled.waiting += scheduled.task.on_computed(scheduled.reported, scheduled.reported + size, None)
            scheduled.reported += size

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        scheduled = self._requests.get(request_id)
        if scheduled is not None:
            scheduled.paused = paused

    def is_ready(self) -> bool:
        return any(scheduled.can_step() for scheduled in self._requests.values())

    @torch.inference_mode()
    def step(self) -> Sequence[EngineOutput]:
        outputs: list[EngineOutput] = []
        for scheduled in [scheduled for scheduled in self._requests.values() if scheduled.waiting and not scheduled.paused]:
            outputs += self._settle(scheduled, scheduled.waiting)
            scheduled.waiting = []
        planned = self._plan()
        if planned:
            outputs += self._run(planned)
        return outputs

    def finish(self, request_id: RequestId) -> None:
        self._drop(request_id, keep=True)

    def num_cached_rows(self, session: str) -> int:
        return self._cache.num_rows(session)

    def drop_cached(self, session: str | None = None) -> None:
        if session is None:
            self._cache.drop_all()
        else:
            self._cache.drop(session)

    def export_kv(self, request_id: RequestId) -> KVBlocks | None:
        scheduled = self._requests.get(request_id)
        if scheduled is None or not scheduled.computed:
            return None
        return KVBlocks(num_rows=scheduled.computed, data=self.pool.read(scheduled.table, scheduled.computed))

    def kv_memory(self) -> Memory | None:
        return self.pool.memory

    def hand_off_bytes(self, num_rows: int) -> int:
        return min(self.pool.pages_for(num_rows), self.pool.num_pages) * self.pool.page_bytes

    def lend_pages(self, request_id: RequestId) -> KVPages | None:
        scheduled = self._requests.get(request_id)
        room = self.pool.num_free + self._cache.num_pages
        # Pages of a session's request are not lent: they are cached for its next turn.
        if scheduled is None or not scheduled.computed or scheduled.request.session or room < LENDING_SHARE * self.pool.num_pages:
            return None
        pages = KVPages(num_rows=scheduled.computed, at=self.pool.locate(scheduled.table), table=scheduled.table)
        del self._requests[request_id]
        return pages

    def reserve_pages(self, num_rows: int) -> KVPages | None:
        table = self.pool.open_table()
        while not self.pool.grow(table, num_rows, clean=False):
            if not self._cache.drop_oldest():
                self.pool.close_table(table)
                return None
        return KVPages(num_rows=num_rows, at=self.pool.locate(table), table=table)

    def free_pages(self, pages: KVPages) -> None:
        self.pool.close_table(cast(PageTable, pages.table))

    @torch.inference_mode()
    def import_kv(self, request_id: RequestId, blocks: KVBlocks | KVPages) -> bool:
        """Import all rows but the last: the next draw needs it computed here."""
        scheduled = self._requests.get(request_id)
        num_rows = min(blocks.num_rows, scheduled.task.num_rows - 1) if scheduled is not None else 0
        if scheduled is None or scheduled.computed or num_rows <= 0 or not self._put(scheduled, blocks, num_rows):
            return False
        scheduled.computed = scheduled.reported = num_rows
        try:
            scheduled.waiting += scheduled.task.on_computed(num_rows, num_rows, None)
        except FAILURES as error:
            scheduled.waiting.append(_failed(scheduled, error))
        return True

    def _put(self, scheduled: ScheduledRequest[TaskT], blocks: KVBlocks | KVPages, num_rows: int) -> bool:
        """Use the blocks as the request's first rows."""
        if isinstance(blocks, KVPages):
            self.pool.close_table(scheduled.table)
            scheduled.table, scheduled.cached = cast(PageTable, blocks.table), None
            return True
        try:
            if not self.pool.grow(scheduled.table, num_rows):
                return False
            fits = self.pool.write(scheduled.table, blocks.data, blocks.num_rows)
        except FAILURES:
            self._evict(scheduled)  # its pages may be written partly
            raise
        if not fits:
            request, num_bytes = scheduled.request.request_id, len(blocks.data)
            why = f"{num_bytes} bytes are not {blocks.num_rows} rows of this pool ({self.pool.layout})"
            log.warning("request %s: %s; the rows are computed here", request, why, extra={"request_id": request})
            self._evict(scheduled)
            return False
        return True

    def abort(self, request_id: RequestId) -> None:
        self._drop(request_id)

    def check(self) -> None:
        check_device(self.pool.data.device)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._requests),
            ready=sum(scheduled.can_step() for scheduled in self._requests.values()),
            pages_used=self.pool.num_used,
            pages_total=self.pool.num_pages,
            pages_cached=self._cache.num_pages,
            rows_reused=self._rows_reused,
        )

    def _drop(self, request_id: RequestId, *, keep: bool = False) -> None:
        scheduled = self._requests.pop(request_id, None)
        if scheduled is None:
            return
        if keep and scheduled.cached is not None:
            self._cache.put_back(scheduled.request.session, scheduled.cached)
        elif keep and scheduled.request.session:
            self._cache.put(scheduled.request.session, scheduled.task.prefix(), scheduled.table, scheduled.computed)
        else:
            self.pool.close_table(scheduled.table)

    def _plan(self) -> list[tuple[ScheduledRequest[TaskT], Extent]]:
        """Choose rows, oldest request first, as pages allow; single rows come first in the pass."""
        planned: list[tuple[ScheduledRequest[TaskT], Extent]] = []
        for scheduled in self._requests.values():
            if len(planned) == self.limits.max_batch:
                break
            if not scheduled.can_step():
                continue
            size = self.limits.prefill_chunk_tokens
            stop = min(scheduled.task.num_rows, (scheduled.computed // size + 1) * size)
            if self._find_pages(scheduled, stop):
                planned.append((scheduled, Extent(table=scheduled.table, start=scheduled.computed, stop=stop)))
        return sorted(planned, key=lambda entry: entry[1].num_rows > 1)

    def _find_pages(self, scheduled: ScheduledRequest[TaskT], stop: int) -> bool:
        """Grow the request's table, evicting younger requests if necessary. A new request waits until all its rows fit."""
        room = self.pool.num_free + self._cache.num_pages
        if not scheduled.table.pages and self.pool.pages_for(scheduled.task.num_rows) > room:
            if any(other.table.pages and not other.paused for other in self._requests.values()):
                return False
        while not self.pool.grow(scheduled.table, stop):
            if self._cache.drop_oldest():
                continue
            victim = self._youngest_holder()
            if victim is None or victim is scheduled:
                return False
            self._evict(victim)
        return True

    def _youngest_holder(self) -> ScheduledRequest[TaskT] | None:
        holders = [scheduled for scheduled in reversed(self._requests.values()) if scheduled.table.pages]
        # A paused request, which waits for its client, is evicted first, however old it is.
        return next((scheduled for scheduled in holders if scheduled.paused), holders[0] if holders else None)

    def _evict(self, victim: ScheduledRequest[TaskT]) -> None:
        self.pool.close_table(victim.table)
        victim.table, victim.computed, victim.cached = self.pool.open_table(), 0, None

    def _run(self, planned: list[tuple[ScheduledRequest[TaskT], Extent]]) -> list[EngineOutput]:
        """Run one pass; if it fails, run each request alone, so that only the one at fault fails.

        Raises: the error of the pass, if a request advanced in it: its output is lost, and another attempt would skip it.
        """
        before = _progress(planned)
        try:
            return self._pass(planned)
        except FAILURES as error:
            if len(planned) > 1 and _progress(planned) != before:
                raise
            if len(planned) > 1:
                return [output for entry in planned for output in self._run([entry])]
            scheduled = planned[0][0]
            return list(self._settle(scheduled, [_failed(scheduled, error)]))

    def _pass(self, planned: list[tuple[ScheduledRequest[TaskT], Extent]]) -> list[EngineOutput]:
        done = self._runner.forward([(scheduled.task, extent) for scheduled, extent in planned])
        outputs: dict[RequestId, list[EngineOutput]] = {}
        for scheduled, extent in planned:
            scheduled.computed = extent.stop
            new: Sequence[EngineOutput] = ()
            if scheduled.reported < extent.stop:
                tapped_NH = done.tapped_rows(extent, max(extent.start, scheduled.reported))
                new = scheduled.task.on_computed(scheduled.reported, extent.stop, tapped_NH)
                scheduled.reported = extent.stop
            outputs[scheduled.request.request_id] = [*new, *done.drawn.get(id(extent), ())]
        return [output for scheduled, _ in planned for output in self._settle(scheduled, outputs[scheduled.request.request_id])]

    def _settle(self, scheduled: ScheduledRequest[TaskT], outputs: Sequence[EngineOutput]) -> Sequence[EngineOutput]:
        """Free a request that ends with these outputs; nothing follows its end."""
        for number, output in enumerate(outputs):
            if output.final or output.error is not None:
                self._drop(scheduled.request.request_id, keep=output.error is None)
                return outputs[: number + 1]
        return outputs


def _progress(planned: Sequence[tuple[ScheduledRequest[TaskT], Extent]]) -> list[tuple[int, int, int, bool]]:
    """Return the state of each request that a pass changes."""
    return [
        (scheduled.computed, scheduled.reported, scheduled.task.num_rows, scheduled.task.wants_draw) for scheduled, _ in planned
    ]


def _failed(scheduled: ScheduledRequest[TaskT], error: Exception) -> EngineOutput:
    """Return the output of a failed request; log errors other than the user's mistakes."""
    if not isinstance(error, FleetError):
        labels = {"request_id": scheduled.request.request_id, "walk": scheduled.walk}
        log.error("the engine failed a request", exc_info=error, extra=labels)
    failure = failure_of("the engine failed the request", error)
    return EngineOutput(request_id=scheduled.request.request_id, walk=scheduled.walk, error=failure)
