"""A request in the batch loop, and how steps change its progress. Knows no model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from torch import Tensor

from fleet.core.errors import FleetError, failure_of
from fleet.core.ids import NO_WALK, RequestId, Walk
from fleet.engine.base import EngineOutput, EngineRequest
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.pass_queue import PassEntry
from fleet.engine.torch.prefix import CachedPrefix
from fleet.engine.torch.program import TaskT
from fleet.engine.torch.rows import joined

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest(Generic[TaskT]):
    """A request in the batch loop, with its progress. A row is one position of its input or answer.

    Invariants: 0 <= computed <= begun <= task.num_rows, and while a step computes drafts, `begun`
    counts them too; pages cover `begun` rows; rows below `reported` were reported to the task as
    computed.
    `running`: the request's entries in steps that have begun and not ended, which compute rows
    `computed` to `begun`.
    `rope_len`: value of `ProgramTask.rope_len` with which rows below `begun` are computed.
    `cached`: the cached prefix of the request's session, whose pages the request has, until a row
    differs from the prefix. `alone`: True if the request must have a step of its own, since a step
    with others failed. `held`: hidden states of the tapped layer of the last computed rows, which
    are reported with the rest of their chunk.
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
    rope_len: int = 0
    held: list[Tensor] = field(default_factory=list[Tensor])

    def can_settle(self) -> bool:
        return bool(self.waiting) and not self.paused

    @property
    def rope_len_now(self) -> int:
        """Text length for which the next step scales the request's rotary embeddings."""
        return self.task.rope_len(self.task.num_rows)

    def can_begin(self) -> bool:
        return not self.paused and self.begun < self.task.num_rows

    @property
    def num_left(self) -> int:
        """Number of known rows that no step has begun."""
        return self.task.num_rows - self.begun

    @property
    def is_decoding(self) -> bool:
        """True if the next step computes one row of the request and samples a token after it."""
        return self.num_left == 1 and self.task.wants_draw

    @property
    def num_reusable(self) -> int:
        """Number of computed rows that the session's next request may reuse: the task has their
        tapped hidden states.
        """
        return self.reported if self.held else self.computed

    def comes_before(self, other: "ScheduledRequest[TaskT]") -> bool:
        """Return True if this request may take the pages of `other`, because `other` is a request
        for hidden states and this one is for an answer.
        """
        return bool(other.request.captured) and not self.request.captured

    def restart_at(self, computed: int) -> None:
        """Make the loop compute all positions from `computed` on again; results of steps that are
        running are not used.
        """
        for entry in self.running:
            entry.is_void = True
        self.running.clear()
        if computed < self.computed:
            self.held.clear()
        self.computed = self.begun = computed

    def report(
        self, stop: int, tapped_NH: Tensor | None, *, is_cut: bool
    ) -> Sequence[EngineOutput]:
        """Report newly computed rows up to `stop` to the task and return its outputs. If the rows
        are part of a chunk (`is_cut`), they are reported with the rest of it, so that the outputs
        do not depend on the time of steps.

        `tapped_NH`: hidden states of the rows in the tapped layer, if it has one.
        """
        if tapped_NH is not None:
            self.held.append(tapped_NH)
        if is_cut:
            return ()
        outputs = self.task.on_computed(
            self.reported, stop, joined(self.held) if self.held else None
        )
        self.held.clear()
        self.reported = stop
        return outputs

    def evict(self, pool: KVPool) -> None:
        """Free the request's pages; all its positions will be computed again."""
        pool.close_table(self.table)
        self.restart_at(0)
        self.table, self.cached = pool.open_table(), None

    def follow_length(self, pool: KVPool) -> None:
        """Make the loop compute all positions again if the text has reached a length at which its
        rotary embeddings are scaled differently.
        """
        if self.rope_len != self.rope_len_now:
            self.evict(pool)
            self.rope_len = self.rope_len_now


Planned = tuple[ScheduledRequest[TaskT], PassEntry[TaskT]]


def progress_of(planned: Sequence[Planned[TaskT]]) -> list[tuple[int, int, int, bool]]:
    """Return the progress of each request of a step, by which a failed step that advanced a request
    is recognised: computed, reported and known rows, and whether a token is wanted.
    """
    return [
        (scheduled.computed, scheduled.reported, scheduled.task.num_rows, scheduled.task.wants_draw)
        for scheduled, _ in planned
    ]


def num_prompt_rows(planned: Sequence[Planned[TaskT]]) -> int:
    """Return the number of a step's rows that belong to prompts: to more than one known row of a
    request.
    """
    rows = [entry.extent.num_rows - len(entry.extent.drafts) for _, entry in planned]
    return sum(rows) - rows.count(1)


def named(planned: Sequence[Planned[TaskT]]) -> list[tuple[RequestId, PassEntry[TaskT]]]:
    return [(scheduled.request.request_id, entry) for scheduled, entry in planned]


def failed(scheduled: ScheduledRequest[TaskT], error: Exception) -> EngineOutput:
    """Return the output that ends a request with `error`; log the error unless it is a
    FleetError.
    """
    if not isinstance(error, FleetError):
        labels = {"request_id": scheduled.request.request_id, "walk": scheduled.walk}
        log.error("the engine failed a request", exc_info=error, extra=labels)
    failure = failure_of("the engine failed the request", error)
    return EngineOutput(request_id=scheduled.request.request_id, walk=scheduled.walk, error=failure)
