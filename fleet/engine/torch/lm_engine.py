"""The batch loop of autoregressive stages: requests join and leave at any step; prompt chunks and decode rows share a pass.

Memory: pages are allocated as rows are computed. When they run out, cached prefixes are dropped first; then the youngest request
with pages is evicted and recomputed later from its rows (its draws stand). The oldest is never evicted, so the loop makes
progress.
Several passes may run at a time, if other processes compute parts of them; they end in the order in which they began, and each
process computes them in that order, so that pages may be allocated again as soon as they are free. Knows no model.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, cast

import torch

from fleet.core.errors import BadInput, FleetError, OutOfPages, failure_of
from fleet.core.ids import RequestId, Walk
from fleet.core.pages import Memory
from fleet.engine.base import (
    NUM_POSITIONS,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    KVBlocks,
    KVPages,
    SavedSession,
    SessionCopied,
)  # fmt: skip
from fleet.engine.torch.device import check_device
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.pass_queue import FAILURES, PassEntry, PassFailure, PassQueue
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.prefix import CachedPrefix, PrefixCache, num_equal_keys
from fleet.engine.torch.program import Program, TaskT
from fleet.engine.torch.session_transfer import SessionCopies

log = logging.getLogger(__name__)
NO_WALK = Walk("")
LENDING_SHARE = 0.5
"""Share of the pool that must be free to lend pages: running requests come first, and a copy serves as well."""


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

    Invariants: 0 <= computed <= begun <= task.num_rows; pages cover `begun` rows; rows below `reported` were reported to the task
    as computed. `running`: its parts in passes that began and have not ended, which compute rows `computed` to `begun`.
    `cached`: the prefix of its session, whose pages it has, until a row differs from it. `alone`: a pass with others failed.
    """

    request: EngineRequest
    task: TaskT
    table: PageTable
    computed: int = 0
    begun: int = 0
    reported: int = 0
    running: list[PassEntry[TaskT]] = field(default_factory=list[PassEntry[TaskT]])
    alone: bool = False
    paused: bool = False
    fed_final: bool = False
    walk: Walk = NO_WALK
    waiting: list[EngineOutput] = field(default_factory=list[EngineOutput])
    cached: CachedPrefix | None = None

    def can_settle(self) -> bool:
        return bool(self.waiting) and not self.paused

    def can_begin(self) -> bool:
        return not self.paused and self.begun < self.task.num_rows

    def restart_at(self, computed: int) -> None:
        """Let the rows from `computed` on be computed again; results of passes that are running are not used."""
        for entry in self.running:
            entry.is_void = True
        self.running.clear()
        self.computed = self.begun = computed


Planned = tuple[ScheduledRequest[TaskT], PassEntry[TaskT]]


class LMEngine(Engine, Generic[TaskT]):
    """One stage's batch loop. Not thread-safe."""

    def __init__(self, program: Program[TaskT], pool: KVPool, passes: PassQueue[TaskT], limits: LoopLimits) -> None:
        self.program, self.pool, self.limits, self._passes = program, pool, limits, passes
        self._running: deque[list[Planned[TaskT]]] = deque()
        self._requests: dict[RequestId, ScheduledRequest[TaskT]] = {}
        self._cache = PrefixCache(pool)
        self._rows_reused = 0
        self._copies = SessionCopies(pool, self._cache, passes)

    def copies_sessions(self) -> bool:
        return True

    def begin_save(self, session: str) -> None:
        self._copies.begin_save(session)

    def begin_load(self, session: str, saved: SavedSession) -> None:
        self._copies.begin_load(session, saved)

    def take_copied(self) -> Sequence[SessionCopied]:
        return self._copies.take_done()

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
        scheduled.computed = scheduled.begun = num_equal_keys(known, kept.prefix.keys)
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
        requests = self._requests.values()
        if self._passes.has_ended or any(scheduled.can_settle() for scheduled in requests):
            return True
        return self._passes.num_free > 0 and any(scheduled.can_begin() for scheduled in requests)

    def due_in_s(self) -> float:
        if self.is_ready() or (self._running and self._passes.is_open):
            return 0.0
        waits = bool(self._running) or any(scheduled.can_begin() for scheduled in self._requests.values())
        return self._passes.retry_s if waits else math.inf

    def await_pass(self, timeout_s: float) -> bool:
        self._passes.follow_route()
        return bool(self._running) and self._passes.await_ended(timeout_s)

    def accepts_requests(self) -> bool:
        return self._passes.is_open

    def outage(self) -> FleetError | None:
        return self._passes.outage()

    def take_suspects(self) -> Sequence[RequestId]:
        suspects = {id(task) for task in self._passes.take_suspects()}
        return [request for request, scheduled in self._requests.items() if id(scheduled.task) in suspects] if suspects else ()

    @torch.inference_mode()
    def step(self) -> Sequence[EngineOutput]:
        outputs: list[EngineOutput] = []
        self._passes.follow_route()
        for scheduled in [scheduled for scheduled in self._requests.values() if scheduled.can_settle()]:
            outputs += self._settle(scheduled, scheduled.waiting)
            scheduled.waiting = []
        outputs += self._collect()
        for _ in range(self._passes.num_free):
            planned = self._plan()
            if not planned:
                break
            outputs += self._begin(planned)
            outputs += self._collect()
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
        scheduled.computed = scheduled.begun = scheduled.reported = num_rows
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
            ready=sum(scheduled.can_settle() or scheduled.can_begin() for scheduled in self._requests.values()),
            pages_used=self.pool.num_used,
            pages_total=self.pool.num_pages,
            pages_cached=self._cache.num_pages,
            rows_reused=self._rows_reused,
        )

    def _drop(self, request_id: RequestId, *, keep: bool = False) -> None:
        scheduled = self._requests.pop(request_id, None)
        if scheduled is None:
            return
        scheduled.restart_at(scheduled.computed)
        if keep and scheduled.cached is not None:
            self._cache.put_back(scheduled.request.session, scheduled.cached)
        elif keep and scheduled.request.session:
            self._cache.put(scheduled.request.session, scheduled.task.prefix(), scheduled.table, scheduled.computed)
        else:
            self.pool.close_table(scheduled.table)

    def _plan(self) -> list[Planned[TaskT]]:
        """Choose rows, oldest request first, as pages allow; single rows come first in the pass."""
        planned: list[Planned[TaskT]] = []
        num_open = sum(bool(scheduled.running) or scheduled.can_begin() for scheduled in self._requests.values())
        limit = min(self.limits.max_batch, self._passes.max_requests(num_open))
        for scheduled in self._requests.values():
            if len(planned) == limit or (planned and planned[0][0].alone):
                break
            if not scheduled.can_begin() or (planned and scheduled.alone):
                continue
            size = self.limits.prefill_chunk_tokens
            stop = min(scheduled.task.num_rows, (scheduled.begun // size + 1) * size)
            if self._find_pages(scheduled, stop):
                extent = Extent(table=scheduled.table, start=scheduled.begun, stop=stop)
                planned.append((scheduled, PassEntry(task=scheduled.task, extent=extent)))
        return sorted(planned, key=lambda entry: entry[1].extent.num_rows > 1)

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
        victim.restart_at(0)
        victim.table, victim.cached = self.pool.open_table(), None

    def _begin(self, planned: list[Planned[TaskT]]) -> Sequence[EngineOutput]:
        """Begin a pass; if that fails, each of its requests runs alone from then on, so that only the one at fault fails.

        Raises: the error of the pass, if a request advanced in it: its output is lost, and another attempt would skip it.
        """
        before = _progress(planned)
        try:
            self._passes.begin([entry for _, entry in planned])
        except FAILURES as error:
            if len(planned) > 1 and _progress(planned) != before:
                raise
            return self._fail_pass(planned, error)
        for scheduled, entry in planned:
            scheduled.begun = entry.extent.stop
            scheduled.running.append(entry)
        self._running.append(planned)
        return ()

    def _fail_pass(self, planned: Sequence[Planned[TaskT]], error: Exception) -> Sequence[EngineOutput]:
        """Fail the request of a pass that it had alone; let those of a larger one each have a pass of their own."""
        current = [scheduled for scheduled, entry in planned if not entry.is_void]
        if len(planned) == 1 and current:
            return list(self._settle(current[0], [_failed(current[0], error)]))
        for scheduled in current:
            scheduled.restart_at(scheduled.computed)
            scheduled.alone = True
        return ()

    def _collect(self) -> list[EngineOutput]:
        """Return the outputs of the passes that have ended. Raises: as `PassQueue.take_ended`; the pass is lost."""
        outputs: list[EngineOutput] = []
        while self._passes.has_ended:
            planned = self._running.popleft()
            try:
                done = self._passes.take_ended()
            except FAILURES:
                for scheduled, _ in planned:
                    scheduled.restart_at(scheduled.computed)
                raise
            outputs += self._complete(planned, done) if isinstance(done, PassDone) else self._on_failure(planned, done)
        return outputs

    def _on_failure(self, planned: Sequence[Planned[TaskT]], failure: PassFailure) -> Sequence[EngineOutput]:
        if not failure.loses_rows:
            return self._fail_pass(planned, failure.error)
        for scheduled in [each for each, entry in planned if not entry.is_void]:
            scheduled.restart_at(0)
        return ()

    def _complete(self, planned: Sequence[Planned[TaskT]], done: PassDone) -> Sequence[EngineOutput]:
        outputs: list[tuple[ScheduledRequest[TaskT], list[EngineOutput]]] = []
        for scheduled, entry in planned:
            if entry.is_void:
                continue
            scheduled.running.remove(entry)
            extent, scheduled.computed, scheduled.alone = entry.extent, entry.extent.stop, False
            new: Sequence[EngineOutput] = ()
            if scheduled.reported < extent.stop:
                tapped_NH = done.tapped_rows(extent, max(extent.start, scheduled.reported))
                new = scheduled.task.on_computed(scheduled.reported, extent.stop, tapped_NH)
                scheduled.reported = extent.stop
            outputs.append((scheduled, [*new, *done.drawn.get(id(extent), ())]))
        return [output for scheduled, its in outputs for output in self._settle_or_hold(scheduled, its)]

    def _settle_or_hold(self, scheduled: ScheduledRequest[TaskT], outputs: list[EngineOutput]) -> Sequence[EngineOutput]:
        """Hold the outputs of a request that was paused while its pass ran."""
        if scheduled.paused:
            scheduled.waiting += outputs
            return ()
        return self._settle(scheduled, outputs)

    def _settle(self, scheduled: ScheduledRequest[TaskT], outputs: Sequence[EngineOutput]) -> Sequence[EngineOutput]:
        """Free a request that ends with these outputs; nothing follows its end."""
        for number, output in enumerate(outputs):
            if output.final or output.error is not None:
                self._drop(scheduled.request.request_id, keep=output.error is None)
                return outputs[: number + 1]
        return outputs


def _progress(planned: Sequence[Planned[TaskT]]) -> list[tuple[int, int, int, bool]]:
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
