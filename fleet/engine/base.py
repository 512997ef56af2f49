"""The contract between a worker and the batch loop inside it.

A worker submits requests, feeds them inputs in order, and calls `step()`; each call runs at most one batch pass and returns what
it made. The engine knows no Redis, no edge and no stage: what an array means is between it and the stage's adapter.
Arrays at this border are numpy (host memory, C-contiguous).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId, Walk
from fleet.core.pages import Memory, PagesRef
from fleet.core.request import Sampling

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request's settings. `params` are free-form strings that only the model behind the engine reads (a voice, say).

    `history` is what an earlier owner's engine drew for this request, from the first on and joined along axis 0: it is not drawn
    again but returned again, and what follows continues it; or what the request itself gives. Empty where an answer begins anew.
    `session`: when the request has ended by itself or by `finish`, what was computed of it is kept for the next request of this
    name, which need not compute the rows with which it begins alike. Where empty, nothing is kept nor taken.
    """

    request_id: RequestId
    sampling: Sampling
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Arrays = field(default_factory=dict[str, np.ndarray])
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInput:
    """The next piece of a request's input. `walk` is the phase it belongs to; after `final` nothing may be fed."""

    walk: Walk
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one pass made for one request, in order. `final` ends the request; `error` ends it without the rest."""

    request_id: RequestId
    walk: Walk
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    final: bool = False
    error: FleetError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlocks:
    """The computed keys and values of a request's first `num_rows` rows, as the pages of the pool they come from.

    Shapes: `data` is uint8 [bytes]; what it holds is between engines of one stage and one configuration.
    """

    num_rows: int
    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPages:
    """Pages of an engine's own pool that belong to no request: full ones, lent for another engine to read, or empty ones, into
    which another's are read. They hold, or will hold, the keys and values of `num_rows` rows. `table` is the engine's own.
    """

    num_rows: int
    at: PagesRef
    table: object


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """`running` requests are held; `ready` could take part in the next step. Pages are 0 for an engine without a KV pool.

    `pages_kept` are those of `pages_used` that no request holds but sessions do. `rows_reused` counts the rows that sessions have
    spared, since the engine was made.
    """

    running: int
    ready: int
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    rows_reused: int = 0


class Engine(Protocol):
    """One batch loop. Not thread-safe: every method is called from the worker's loop thread."""

    def submit(self, request: EngineRequest) -> None:
        """Take a request. Raises: OutOfPages when it could never fit."""
        ...

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        """Append input. A request unknown (ended, aborted) is ignored. Returns how many of its rows its session spares."""
        ...

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """A paused request (no credit downstream) is skipped by `step()`; the batch goes on without it."""
        ...

    def is_ready(self) -> bool:
        """Whether `step()` would run a pass now."""
        ...

    def due_in_s(self) -> float:
        """Seconds until `ready()` with what was fed: 0 if it is so now, infinite if more input must come first."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Run one batch pass over every ready request (bounded by the batch and prefill-chunk limits).

        A failure of one request is an output with `error`; the others go on.
        """
        ...

    def finish(self, request_id: RequestId) -> None:
        """End a request early but normally (a stop string was met, or another goes on with it): no more outputs, memory freed."""
        ...

    def num_cached_rows(self, session: str) -> int:
        """How many rows are kept for a session. What is kept is given up whenever a request needs the memory."""
        ...

    def drop_cached(self, session: str | None = None) -> None:
        """Give up what is kept for a session, or for all of them."""
        ...

    def export_kv(self, request_id: RequestId) -> KVBlocks | None:
        """A copy of what is computed of a request, for another engine to adopt; None where there is nothing."""
        ...

    def kv_memory(self) -> Memory | None:
        """Where its pages lie, if another process can read them there."""
        ...

    def lend_pages(self, request_id: RequestId) -> KVPages | None:
        """Finish a request, and keep what is computed of it for another engine to read, until `take_back`. None, and nothing
        done, where there is nothing, or the pages cannot be spared.
        """
        ...

    def reserve_pages(self, num_rows: int) -> KVPages | None:
        """Pages to read so many rows into, until `adopt` or `take_back`; None where there are none to spare."""
        ...

    def free_pages(self, pages: KVPages) -> None:
        """What was lent, or received and not adopted, is free again: nobody reads it or writes to it any more."""
        ...

    def import_kv(self, request_id: RequestId, blocks: KVBlocks | KVPages) -> bool:
        """Take over what another engine computed, for a request that was fed and has not begun. Whether that was possible: if
        not, it is computed here, which takes longer and changes nothing. Received pages are then the request's.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget a request and free its memory. Idempotent; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...
