"""The batch loop of autoregressive stages: requests join and leave at any step; prompt chunks and decode rows share a pass.

Memory: pages are lent as rows are computed. When they run out, the youngest request that holds some gives them all back and is
computed again later from its rows (its draws stand). The eldest is never robbed, so the loop always moves. Before any of them,
prefixes kept for sessions give theirs. Knows no model.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, cast

import torch

from fleet.core.errors import BadInput, FleetError, OutOfPages, failure_of
from fleet.core.ids import RequestId, Walk
from fleet.core.pages import Memory
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest, EngineStats, KVBlocks, KVPages
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import PassRunner
from fleet.engine.torch.prefix import CachedPrefix, PrefixCache, num_equal_keys
from fleet.engine.torch.program import NUM_POSITIONS, Program, TaskT

log = logging.getLogger(__name__)
NO_WALK = Walk("")
LENDING_SHARE = 0.5
"""Of the pool that must be free for pages to be lent: requests that compute come first, and a copy does as well."""
FAILURES = (FleetError, RuntimeError, ValueError, IndexError, KeyError, MemoryError)
"""What torch, numpy and programs raise over one request's data. Anything else is a bug of ours, and the worker's to sort out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Units: `max_batch` requests a pass; `prefill_chunk_tokens` rows of one request a pass."""

    max_batch: int
    prefill_chunk_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest(Generic[TaskT]):
    """A request in the loop.

    Invariants: 0 <= computed <= task.num_rows; pages cover `computed` rows; `told` <= what the task was told was computed.
    `follows`: the prefix of its session, whose pages it has, while no row has come that is another.
    """

    request: EngineRequest
    task: TaskT
    table: PageTable
    computed: int = 0
    told: int = 0
    paused: bool = False
    fed_final: bool = False
    walk: Walk = NO_WALK
    waiting: list[EngineOutput] = field(default_factory=list[EngineOutput])
    follows: CachedPrefix | None = None

    def can_step(self) -> bool:
        return not self.paused and (bool(self.waiting) or self.computed < self.task.num_rows)


class LMEngine(Generic[TaskT]):
    """One stage's loop. Not thread-safe."""

    def __init__(self, program: Program[TaskT], pool: KVPool, runner: PassRunner[TaskT], limits: LoopLimits) -> None:
        self._program, self.pool, self._runner, self._limits = program, pool, runner, limits
        self._held: dict[RequestId, ScheduledRequest[TaskT]] = {}
        self._kept = PrefixCache(pool)
        self._rows_reused = 0

    def submit(self, request: EngineRequest) -> None:
        """Raises: OutOfPages when the whole pool could not hold it; BadInput."""
        if request.request_id in self._held:
            raise BadInput(f"request {request.request_id} was submitted twice")
        most = int(request.params[NUM_POSITIONS])
        if self.pool.pages_for(most) > self.pool.num_pages:
            capacity = self.pool.num_pages * self.pool.page_size
            raise OutOfPages(
                f"max_tokens: This model's maximum context length is {capacity} tokens, what its KV pool holds. However, "
                f"you requested {most} tokens, prompt and answer. Please reduce the length of the messages or max_tokens.",
                param="max_tokens",
            )  # fmt: skip
        task = self._program.open(request)
        follows = self._kept.take(request.session)
        table = follows.table if follows is not None else self.pool.borrow()
        self._held[request.request_id] = ScheduledRequest(request=request, task=task, table=table, follows=follows)

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        held = self._held.get(request_id)
        if held is None:
            return 0
        assert not held.fed_final, "input after the final one"
        held.walk, held.fed_final = piece.walk, piece.final
        try:
            with torch.inference_mode():
                held.waiting += held.task.feed(piece)
                return self._follow(held, held.follows) if held.follows is not None else 0
        except FAILURES as error:
            held.waiting.append(_failed(held, error))
            return 0

    def _follow(self, held: ScheduledRequest[TaskT], kept: CachedPrefix) -> int:
        """Take rows that have just come as computed, as far as the session's prefix has them; how many.

        The last one of all is left to compute: there must be one to draw from, or to end with.
        """
        task, before = held.task, held.computed
        known = task.prefix().keys[: task.num_rows - (task.wants_draw or held.fed_final)]
        held.computed = num_equal_keys(known, kept.prefix.keys)
        if held.computed < task.num_rows or held.computed == len(kept.prefix.keys):
            held.follows = None
            self.pool.shrink(held.table, held.computed)
        if held.computed > before:
            task.on_reused(kept.prefix, before, held.computed)
            self._tell_whole_chunks(held)
        self._rows_reused += held.computed - before
        return held.computed - before

    def _tell_whole_chunks(self, held: ScheduledRequest[TaskT]) -> None:
        """Of rows that are not computed here, tell the task in the very pieces in which they would have been computed: another
        engine, which goes on with the request without the prefix, makes the same pieces. A piece begun is told with its rest.
        """
        size = self._limits.prefill_chunk_tokens
        while held.told + size <= held.computed:
            held.waiting += held.task.on_computed(held.told, held.told + size, None)
            held.told += size

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        held = self._held.get(request_id)
        if held is not None:
            held.paused = paused

    def is_ready(self) -> bool:
        return any(held.can_step() for held in self._held.values())

    def due_in_s(self) -> float:
        return 0.0 if self.is_ready() else math.inf

    @torch.inference_mode()
    def step(self) -> Sequence[EngineOutput]:
        outputs: list[EngineOutput] = []
        for held in [held for held in self._held.values() if held.waiting and not held.paused]:
            outputs += self._settle(held, held.waiting)
            held.waiting = []
        planned = self._plan()
        if planned:
            outputs += self._run(planned)
        return outputs

    def finish(self, request_id: RequestId) -> None:
        self._drop(request_id, keep=True)

    def num_cached_rows(self, session: str) -> int:
        return self._kept.num_rows(session)

    def drop_cached(self, session: str | None = None) -> None:
        if session is None:
            self._kept.give_up_all()
        else:
            self._kept.give_up(session)

    def export_kv(self, request_id: RequestId) -> KVBlocks | None:
        held = self._held.get(request_id)
        if held is None or not held.computed:
            return None
        return KVBlocks(num_rows=held.computed, data=self.pool.read(held.table, held.computed))

    def kv_memory(self) -> Memory | None:
        return self.pool.memory

    def lend_pages(self, request_id: RequestId) -> KVPages | None:
        held = self._held.get(request_id)
        room = self.pool.num_free + self._kept.num_pages
        # Of a session's request, the pages stay for its next turn.
        if held is None or not held.computed or held.request.session or room < LENDING_SHARE * self.pool.num_pages:
            return None
        pages = KVPages(num_rows=held.computed, at=self.pool.place(held.table), table=held.table)
        del self._held[request_id]
        return pages

    def reserve_pages(self, num_rows: int) -> KVPages | None:
        table = self.pool.borrow()
        while not self.pool.grow(table, num_rows, clean=False):
            if not self._kept.give_up_one():
                self.pool.give_back(table)
                return None
        return KVPages(num_rows=num_rows, at=self.pool.place(table), table=table)

    def free_pages(self, pages: KVPages) -> None:
        self.pool.give_back(cast(PageTable, pages.table))

    @torch.inference_mode()
    def import_kv(self, request_id: RequestId, blocks: KVBlocks | KVPages) -> bool:
        """The last row is always computed here: there must be one to draw from."""
        held = self._held.get(request_id)
        num_rows = min(blocks.num_rows, held.task.num_rows - 1) if held is not None else 0
        if held is None or held.computed or num_rows <= 0 or not self._put(held, blocks, num_rows):
            return False
        held.computed = held.told = num_rows
        try:
            held.waiting += held.task.on_computed(num_rows, num_rows, None)
        except FAILURES as error:
            held.waiting.append(_failed(held, error))
        return True

    def _put(self, held: ScheduledRequest[TaskT], blocks: KVBlocks | KVPages, num_rows: int) -> bool:
        """Make the blocks the request's first rows."""
        if isinstance(blocks, KVPages):
            self.pool.give_back(held.table)
            held.table, held.follows = cast(PageTable, blocks.table), None
            return True
        try:
            if not self.pool.grow(held.table, num_rows):
                return False
            fits = self.pool.write(held.table, blocks.data, blocks.num_rows)
        except FAILURES:
            self._rob(held)  # of pages written in part
            raise
        if not fits:
            log.warning(
                "request %s: %d bytes are not %d rows of this pool (%s); they are computed here", held.request.request_id,
                len(blocks.data), blocks.num_rows, self.pool.layout, extra={"request_id": held.request.request_id},
            )  # fmt: skip
            self._rob(held)
            return False
        return True

    def abort(self, request_id: RequestId) -> None:
        self._drop(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._held),
            ready=sum(held.can_step() for held in self._held.values()),
            pages_used=self.pool.num_used,
            pages_total=self.pool.num_pages,
            pages_cached=self._kept.num_pages,
            rows_reused=self._rows_reused,
        )

    def _drop(self, request_id: RequestId, *, keep: bool = False) -> None:
        held = self._held.pop(request_id, None)
        if held is None:
            return
        if keep and held.follows is not None:
            self._kept.put_back(held.request.session, held.follows)
        elif keep and held.request.session:
            self._kept.keep(held.request.session, held.task.prefix(), held.table, held.computed)
        else:
            self.pool.give_back(held.table)

    def _plan(self) -> list[tuple[ScheduledRequest[TaskT], Extent]]:
        """Pick rows, eldest request first, as pages allow; single rows come first in the pass."""
        planned: list[tuple[ScheduledRequest[TaskT], Extent]] = []
        for held in self._held.values():
            if len(planned) == self._limits.max_batch:
                break
            if not held.can_step():
                continue
            size = self._limits.prefill_chunk_tokens
            stop = min(held.task.num_rows, (held.computed // size + 1) * size)
            if self._find_pages(held, stop):
                planned.append((held, Extent(table=held.table, start=held.computed, stop=stop)))
        return sorted(planned, key=lambda entry: entry[1].num_rows > 1)

    def _find_pages(self, held: ScheduledRequest[TaskT], stop: int) -> bool:
        """Grow the request's table, robbing younger ones if need be. One that starts waits until its rows fit at once."""
        room = self.pool.num_free + self._kept.num_pages
        if not held.table.pages and self.pool.pages_for(held.task.num_rows) > room:
            if any(other.table.pages and not other.paused for other in self._held.values()):
                return False
        while not self.pool.grow(held.table, stop):
            if self._kept.give_up_one():
                continue
            victim = self._youngest_holder()
            if victim is None or victim is held:
                return False
            self._rob(victim)
        return True

    def _youngest_holder(self) -> ScheduledRequest[TaskT] | None:
        holders = [held for held in reversed(self._held.values()) if held.table.pages]
        # One that waits for its client moves nothing, however old it is.
        return next((held for held in holders if held.paused), holders[0] if holders else None)

    def _rob(self, victim: ScheduledRequest[TaskT]) -> None:
        self.pool.give_back(victim.table)
        victim.table, victim.computed, victim.follows = self.pool.borrow(), 0, None

    def _run(self, planned: list[tuple[ScheduledRequest[TaskT], Extent]]) -> list[EngineOutput]:
        """One pass. If it fails as a whole, each request is tried alone, so that only the one at fault ends.

        Raises: what the pass raised, if some request has moved on in it: what that made is lost, and a second try would skip it.
        """
        before = _progress(planned)
        try:
            return self._pass(planned)
        except FAILURES as error:
            if len(planned) > 1 and _progress(planned) != before:
                raise
            if len(planned) > 1:
                return [output for entry in planned for output in self._run([entry])]
            held = planned[0][0]
            return list(self._settle(held, [_failed(held, error)]))

    def _pass(self, planned: list[tuple[ScheduledRequest[TaskT], Extent]]) -> list[EngineOutput]:
        done = self._runner.forward([(held.task, extent) for held, extent in planned])
        due = [entry for entry in planned if entry[1].stop == entry[0].task.num_rows and entry[0].task.wants_draw]
        drawn = self._runner.draw([(held.task, done.last_row(extent)) for held, extent in due]) if due else []
        outputs: dict[RequestId, list[EngineOutput]] = {}
        for held, extent in planned:
            held.computed = extent.stop
            made: Sequence[EngineOutput] = ()
            if held.told < extent.stop:
                tapped_NH = done.tapped_rows(extent, max(extent.start, held.told))
                made = held.task.on_computed(held.told, extent.stop, tapped_NH)
                held.told = extent.stop
            outputs[held.request.request_id] = list(made)
        for (held, _), more in zip(due, drawn, strict=True):
            outputs[held.request.request_id] += more
        return [output for held, _ in planned for output in self._settle(held, outputs[held.request.request_id])]

    def _settle(self, held: ScheduledRequest[TaskT], outputs: Sequence[EngineOutput]) -> Sequence[EngineOutput]:
        """Free a request that ends with these outputs; nothing follows its end."""
        for number, output in enumerate(outputs):
            if output.final or output.error is not None:
                self._drop(held.request.request_id, keep=output.error is None)
                return outputs[: number + 1]
        return outputs


def _progress(planned: Sequence[tuple[ScheduledRequest[TaskT], Extent]]) -> list[tuple[int, int, int, bool]]:
    """All that a pass changes of a request and that its outputs tell of."""
    return [(held.computed, held.told, held.task.num_rows, held.task.wants_draw) for held, _ in planned]


def _failed(held: ScheduledRequest[TaskT], error: Exception) -> EngineOutput:
    """Logs what is no mistake of the user's."""
    if not isinstance(error, FleetError):
        labels = {"request_id": held.request.request_id, "walk": held.walk}
        log.error("the engine failed a request", exc_info=error, extra=labels)
    told = failure_of("the engine failed the request", error)
    return EngineOutput(request_id=held.request.request_id, walk=held.walk, error=told)
