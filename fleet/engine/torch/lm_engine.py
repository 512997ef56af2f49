"""The batch loop of autoregressive stages: requests join and leave at any step; prompt chunks and
decode positions share a step.

Memory: pages are allocated as positions are computed. When they run out, cached prefixes are
dropped first; then the youngest request with pages is evicted, requests for hidden states
("captures") before others, and recomputed later (its sampled tokens stand). The oldest is never
evicted, so the loop makes progress. Several steps may run at a time, if other processes compute
parts of them; they end in the order in which they began, and each process computes them in that
order, so that pages may be allocated again as soon as they are free. Knows no model.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, cast

import torch

from fleet.core.ids import RequestId
from fleet.engine.base import (
    NUM_POSITIONS,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    KVStats,
)
from fleet.engine.torch.attention_fast import batching_order
from fleet.engine.torch.captures import Captures
from fleet.engine.torch.device import check_device
from fleet.engine.torch.drafting import Drafting
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.kv_transfer import LoopKVTransfer
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.page_allocation import PageAllocator
from fleet.engine.torch.pass_queue import FAILURES, PassEntry, PassFailure, PassQueue
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.prefix import CachedPrefix, PrefixCache, num_equal_keys
from fleet.engine.torch.program import DraftedTask, Program, TaskT
from fleet.engine.torch.prompt_pace import PromptPace, divided_rows
from fleet.engine.torch.remote_layers import RemoteLayers
from fleet.engine.torch.scheduled import (
    Planned,
    ScheduledRequest,
    failed,
    named,
    num_prompt_rows,
    progress_of,
)
from fleet.engine.torch.session_transfer import SessionCopies
from fleet.engine.turns import check_context, check_is_new

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Limits of a batch loop. `max_batch`: the largest number of requests in a step.
    `prefill_chunk_tokens`: the largest number of positions of one request in a step, without its
    draft tokens. `max_positions`: the largest number of positions of one request that the program
    supports; None if only the size of the pool limits it. `capture_share`: the share of the time
    that requests for hidden states may take while others are computed; if None, such requests are
    refused. `prompt_buckets`: numbers of prompt rows to which steps are padded, if steps are
    captured as graphs; `PromptPace` then limits the prompt rows beside decoding requests.
    """

    max_batch: int
    prefill_chunk_tokens: int
    max_positions: int | None = None
    capture_share: float | None = None
    prompt_buckets: tuple[int, ...] = ()


class LMEngine(Engine, Generic[TaskT]):
    """Engine of an autoregressive stage: the batch loop around a program. Not thread-safe.
    `passes`: queue of running steps; `speculation`: source of draft tokens, which requires a
    `DraftedProgram`; `clock`: a monotonic clock in seconds, which measures steps.
    """

    def __init__(
        self,
        program: Program[TaskT],
        pool: KVPool,
        passes: PassQueue[TaskT],
        limits: LoopLimits,
        speculation: Drafting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.program = program
        self.pool = pool
        self.limits = limits
        self._passes = passes
        self.speculation = speculation
        # with the time at which each began
        self._running: deque[tuple[list[Planned[TaskT]], float]] = deque()
        self._requests: dict[RequestId, ScheduledRequest[TaskT]] = {}
        self._cache = PrefixCache(pool)
        self._allocator = PageAllocator(pool, self._cache, self._requests)
        self._rows_reused = 0
        self._clock = clock
        self._pace = PromptPace(limits.prompt_buckets, clock)
        self._captures = Captures(limits.capture_share)
        self.kv = LoopKVTransfer(pool, self._cache, self._requests)
        self.prefixes = self.sessions = SessionCopies(
            pool, self._cache, passes, program.tapped_width
        )
        self.drafters = speculation
        if passes.num_other_layers:
            self.remote = self.background = RemoteLayers(passes, self._requests, self._running)

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if the whole pool could not hold it; BadInput if the
        program refuses it or its id is in use.
        """
        check_is_new(request.request_id, self._requests)
        self._captures.check(request)
        pool_positions = self.pool.num_pages * self.pool.page_size
        capacity = min(pool_positions, self.limits.max_positions or pool_positions)
        what = ", what its KV pool holds" if capacity == pool_positions else ""
        check_context(int(request.params[NUM_POSITIONS]), capacity, what)
        task = self.program.open(request)
        cached = self._cache.take(request.session)
        table = cached.table if cached is not None else self.pool.open_table()
        self._requests[request.request_id] = ScheduledRequest(
            request=request, task=task, table=table, cached=cached
        )

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        scheduled = self._requests.get(request_id)
        if scheduled is None:
            return 0
        assert not scheduled.fed_final, "input after the final one"
        scheduled.walk, scheduled.fed_final = piece.walk, piece.final
        try:
            with torch.inference_mode():
                scheduled.waiting += scheduled.task.feed(piece)
                scheduled.rope_len = scheduled.rope_len_now
                return (
                    self._reuse_cached(scheduled, scheduled.cached)
                    if scheduled.cached is not None
                    else 0
                )
        except FAILURES as error:
            scheduled.waiting.append(failed(scheduled, error))
            return 0

    def _reuse_cached(self, scheduled: ScheduledRequest[TaskT], kept: CachedPrefix) -> int:
        """Count new positions as computed as far as they equal the session's cached prefix `kept`;
        return the number of reused positions.

        The last position is always computed, since the next token or the end needs its hidden
        state.
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
        """Report reused positions to the task in the chunks in which they would have been computed,
        so that outputs are the same as in an engine without the prefix. An incomplete chunk is
        reported later, with its rest.
        """
        size = self.limits.prefill_chunk_tokens
        while scheduled.reported + size <= scheduled.computed:
            scheduled.waiting += scheduled.task.on_computed(
                scheduled.reported, scheduled.reported + size, None
            )
            scheduled.reported += size

    def num_unread(self, request_id: RequestId) -> int:
        scheduled = self._requests.get(request_id)
        return scheduled.task.num_unread if scheduled is not None else 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        scheduled = self._requests.get(request_id)
        if scheduled is not None:
            scheduled.paused = paused

    def is_ready(self) -> bool:
        if self._passes.has_ended or any(
            scheduled.can_settle() for scheduled in self._requests.values()
        ):
            return True
        if self._passes.num_free == 0:
            return False
        return any(
            scheduled.can_begin() for scheduled in self._captures.choose(self._requests.values())
        )

    def due_in_s(self) -> float:
        if self.is_ready() or (self._running and self._passes.is_open):
            return 0.0
        requests = self._requests.values()
        if self._running or (
            self._passes.num_free == 0 and any(scheduled.can_begin() for scheduled in requests)
        ):
            return self._passes.retry_s
        return self._captures.due_in_s(requests)

    @torch.inference_mode()
    def step(self) -> Sequence[EngineOutput]:
        outputs: list[EngineOutput] = []
        self._passes.follow_route()
        for scheduled in [
            scheduled for scheduled in self._requests.values() if scheduled.can_settle()
        ]:
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

    def abort(self, request_id: RequestId) -> None:
        self._drop(request_id)

    def check(self) -> None:
        check_device(self.pool.data.device)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._requests),
            ready=sum(
                scheduled.can_settle() or scheduled.can_begin()
                for scheduled in self._requests.values()
            ),
            kv=KVStats(
                pages_used=self.pool.num_used,
                pages_total=self.pool.num_pages,
                pages_cached=self._cache.num_pages,
                rows_reused=self._rows_reused,
            ),
            spans=self._passes.figures(),
            speculation=self.speculation.figures() if self.speculation is not None else None,
        )

    def _drop(self, request_id: RequestId, *, keep: bool = False) -> None:
        scheduled = self._requests.pop(request_id, None)
        if scheduled is None:
            return
        scheduled.restart_at(scheduled.computed)
        scheduled.follow_length(self.pool)
        if self.speculation is not None:
            complete = keep and not scheduled.request.captured
            self.speculation.close(request_id, cast(DraftedTask, scheduled.task), complete=complete)
        if keep and scheduled.cached is not None:
            self._cache.put_back(scheduled.request.session, scheduled.cached)
        elif keep and scheduled.request.session:
            self._cache.put(
                scheduled.request.session,
                scheduled.task.prefix(),
                scheduled.table,
                scheduled.num_reusable,
            )
        else:
            self.pool.close_table(scheduled.table)

    def _plan(self) -> list[Planned[TaskT]]:
        """Choose the positions of the next step, oldest request first, as pages allow. Entries with
        equal numbers of positions are next to each other in the result.
        """
        planned: list[Planned[TaskT]] = []
        requests = self._captures.choose(self._requests.values())
        num_open = sum(bool(scheduled.running) or scheduled.can_begin() for scheduled in requests)
        limit = min(self.limits.max_batch, self._passes.max_requests(num_open))
        shares = self._shares(requests, limit)
        for scheduled in requests:
            if len(planned) == limit or (planned and planned[0][0].alone):
                break
            if not scheduled.can_begin() or (planned and scheduled.alone):
                continue
            scheduled.follow_length(self.pool)
            chunk_stop = stop = self._chunk_stop(scheduled)
            if scheduled.request.request_id in shares:
                stop = min(stop, scheduled.begun + shares[scheduled.request.request_id])
            if stop > scheduled.begun and self._allocator.allocate(scheduled, stop):
                extent = Extent(
                    table=scheduled.table,
                    start=scheduled.begun,
                    stop=stop,
                    rope_len=scheduled.rope_len,
                    is_capture=bool(scheduled.request.captured),
                )
                entry = PassEntry(task=scheduled.task, extent=extent, is_cut=stop < chunk_stop)
                planned.append((scheduled, entry))
        if self.speculation is not None:
            drafted = self.speculation.with_drafts(named(planned), self.pool)
            planned = [
                (scheduled, entry) for (scheduled, _), entry in zip(planned, drafted, strict=True)
            ]
        return sorted(planned, key=lambda entry: batching_order(entry[1].extent))

    def _chunk_stop(self, scheduled: ScheduledRequest[TaskT]) -> int:
        """Return the position at which the request's next chunk ends."""
        size = self.limits.prefill_chunk_tokens
        return min(scheduled.task.num_rows, (scheduled.begun // size + 1) * size)

    def _shares(
        self, requests: Collection[ScheduledRequest[TaskT]], limit: int
    ) -> dict[RequestId, int]:
        """Return the largest number of rows of each prompt in the next step if the step's time is
        limited, because requests decode in it; empty without a limit. `limit`: number of requests
        in the step.
        """
        max_rows = self._pace.max_rows()
        if max_rows is None:
            return {}
        chosen = [scheduled for scheduled in requests if scheduled.can_begin()][:limit]
        prompts = [scheduled for scheduled in chosen if not scheduled.is_decoding]
        if len(prompts) == len(chosen):
            return {}
        wanted = [self._chunk_stop(scheduled) - scheduled.begun for scheduled in prompts]
        rows = divided_rows(wanted, max_rows)
        return {
            scheduled.request.request_id: share
            for scheduled, share in zip(prompts, rows, strict=True)
        }

    def _begin(self, planned: list[Planned[TaskT]]) -> Sequence[EngineOutput]:
        """Begin a step; if that fails, each of its requests is computed in a step of its own from
        then on, so that only the faulty one fails.

        Raises: the error of the step, if a request advanced in it: its output is lost, and another
        attempt would skip it.
        """
        before, began_s = progress_of(planned), self._clock()
        try:
            self._passes.begin([entry for _, entry in planned])
        except FAILURES as error:
            if len(planned) > 1 and progress_of(planned) != before:
                raise
            return self._fail_pass(planned, error)
        for scheduled, entry in planned:
            scheduled.begun = entry.extent.stop
            scheduled.running.append(entry)
        self._running.append((planned, began_s))
        return ()

    def _fail_pass(
        self, planned: Sequence[Planned[TaskT]], error: Exception
    ) -> Sequence[EngineOutput]:
        """Fail the request of a step that had no other request. After a step of several requests,
        compute each request again in a step of its own.
        """
        current = [scheduled for scheduled, entry in planned if not entry.is_void]
        if len(planned) == 1 and current:
            return list(self._settle(current[0], [failed(current[0], error)]))
        log.warning(
            "a step of %d requests failed; each is computed again by itself",
            len(current),
            exc_info=error,
        )
        for scheduled in current:
            scheduled.restart_at(scheduled.computed)
            scheduled.alone = True
        return ()

    def _collect(self) -> list[EngineOutput]:
        """Return the outputs of the steps that have ended. Raises: the errors of
        `PassQueue.take_ended`; the outputs of that step are lost.
        """
        outputs: list[EngineOutput] = []
        while self._passes.has_ended:
            planned, began_s = self._running.popleft()
            try:
                done = self._passes.take_ended()
            except FAILURES:
                for scheduled, _ in planned:
                    scheduled.restart_at(scheduled.computed)
                raise
            took_s = self._clock() - began_s
            if isinstance(done, PassDone):
                self._pace.record(num_prompt_rows(planned), took_s, has_sampled=bool(done.drawn))
            is_of_captures = self._captures.record(planned, took_s)
            if isinstance(done, PassDone) and self.speculation is not None and not is_of_captures:
                self.speculation.record(named(planned), done, took_s)
            outputs += (
                self._complete(planned, done)
                if isinstance(done, PassDone)
                else self._on_failure(planned, done)
            )
        return outputs

    def _on_failure(
        self, planned: Sequence[Planned[TaskT]], failure: PassFailure
    ) -> Sequence[EngineOutput]:
        if not failure.loses_rows:
            return self._fail_pass(planned, failure.error)
        for scheduled in [each for each, entry in planned if not entry.is_void]:
            scheduled.restart_at(0)
        return ()

    def _complete(
        self, planned: Sequence[Planned[TaskT]], done: PassDone
    ) -> Sequence[EngineOutput]:
        outputs: list[tuple[ScheduledRequest[TaskT], list[EngineOutput]]] = []
        for scheduled, entry in planned:
            if entry.is_void:
                continue
            scheduled.running.remove(entry)
            extent, stop, scheduled.alone = (
                entry.extent,
                entry.extent.stop - done.num_rejected(entry.extent),
                False,
            )
            scheduled.computed = stop
            if extent.drafts:
                scheduled.begun = stop
            new: Sequence[EngineOutput] = ()
            if scheduled.request.captured:
                new = self._captures.outputs(scheduled, extent, done)
                scheduled.reported = max(scheduled.reported, stop)
            elif scheduled.reported < stop:
                tapped_NH = done.tapped_rows(extent, max(extent.start, scheduled.reported), stop)
                new = scheduled.report(stop, tapped_NH, is_cut=entry.is_cut)
            outputs.append((scheduled, [*new, *done.drawn.get(id(extent), ())]))
        return [
            output for scheduled, its in outputs for output in self._settle_or_hold(scheduled, its)
        ]

    def _settle_or_hold(
        self, scheduled: ScheduledRequest[TaskT], outputs: list[EngineOutput]
    ) -> Sequence[EngineOutput]:
        """Return the outputs of a request for a finished step. If the request was paused meanwhile,
        keep the outputs until it is resumed, and return nothing.
        """
        if scheduled.paused:
            scheduled.waiting += outputs
            return ()
        return self._settle(scheduled, outputs)

    def _settle(
        self, scheduled: ScheduledRequest[TaskT], outputs: Sequence[EngineOutput]
    ) -> Sequence[EngineOutput]:
        """Return the outputs up to the request's end, if they contain it; the request is then
        removed from the loop.
        """
        for number, output in enumerate(outputs):
            if output.final or output.error is not None:
                self._drop(scheduled.request.request_id, keep=output.error is None)
                return outputs[: number + 1]
        return outputs
