"""The contract between a worker and the batch loop inside it.

A worker submits requests, feeds them inputs in order, and calls `step()`; each call runs at most
one batch pass and returns its outputs. Knows no Redis, no edge and no stage: the stage's adapter
defines the meaning of arrays, which are numpy (host memory, C-contiguous).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from fleet.core.errors import BadInput, FleetError
from fleet.core.ids import RequestId, Walk
from fleet.core.pages import Memory, PagesRef
from fleet.core.request import Sampling
from fleet.core.session_parts import SessionLimits
from fleet.drafts.figures.speculation import OFF, SpeculationFigures
from fleet.drafts.figures.training import TrainingFigures
from fleet.spans.protocol.figures import SpanFigures

Arrays = Mapping[str, np.ndarray]
TOKEN = "token"
"""Name of the array of a drawn token: int32 [1]."""
NUM_POSITIONS = "num_positions"
"""Request parameter: the most positions that a request may take, prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request's settings. `params` are free-form strings for the model behind the engine (a
    voice, say).

    `history`: the outputs that an earlier owner's engine drew for this request, or that the request
    itself contains, from the first one on and joined along axis 0: they are returned again without
    being drawn, and later outputs continue them.
    `session`: after a normal end, the computed rows are cached for the session's next request,
    which reuses those that it begins with. Without a name nothing is cached or reused.
    `captured`: names of `fleet.core.captures`: nothing is drawn; these rows of every position,
    those of `history` included, are the outputs, float32 [n, width]. Such a request runs in time
    that others leave.
    """

    request_id: RequestId
    sampling: Sampling
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Arrays = field(default_factory=dict[str, np.ndarray])
    session: str = ""
    captured: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInput:
    """The next piece of a request's input. `walk` is the phase it belongs to; after `final` nothing
    may be fed.
    """

    walk: Walk
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    final: bool = False


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one pass for one request, in order. `final` ends the request; `error` ends it
    early. `num_reused`: reused rows that `feed` could not know of. One that is neither and has no
    arrays follows the prompt in an engine that draws nothing: the request is to be handed off.
    """

    request_id: RequestId
    walk: Walk
    arrays: Arrays = msgspec.field(default_factory=dict[str, np.ndarray])
    final: bool = False
    error: FleetError | None = None
    num_reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlocks:
    """The computed keys and values of a request's first `num_rows` rows: a copy, as pages of their
    pool, or a description of where another engine reads them.

    Shapes: `data` is uint8 [bytes], readable by engines of the same stage and configuration.
    """

    num_rows: int
    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPages:
    """Pages of an engine's pool that belong to no request, for keys and values of `num_rows` rows:
    full ones that are lent for another engine to read, or empty ones that another's are read into.
    `table` is private to the engine.
    """

    num_rows: int
    at: PagesRef
    table: object


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A copy of a session's cached rows, of all layers of the model. `layout`: dtype and sizes,
    which must be the same.

    Shapes: `keys` int64 [N], which identify the rows; `layers` uint8 [N x bytes of a row's keys and
    values], in order.
    `tapped`: by position, the rows that are sent to the next stage.
    """

    num_rows: int
    keys: np.ndarray
    layers: Sequence[np.ndarray]
    layout: str
    tapped: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCopied:
    """End of a copy. `saved`: of a session that was saved. `error`: why it failed."""

    session: str
    saved: SavedSession | None = None
    error: FleetError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """`running`: requests submitted and not ended; `ready`: those that the next step can run. Pages
    are 0 without a KV pool.

    `pages_cached`: the part of `pages_used` that caches prefixes of sessions. `rows_reused`: cached
    rows reused since the start.
    `span_figures`: of an anchor's passes. `speculation`: None without it. `training`: of a trainer.
    """

    running: int
    ready: int
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    rows_reused: int = 0
    span_figures: SpanFigures | None = None
    speculation: SpeculationFigures | None = None
    training: TrainingFigures | None = None


class Engine(Protocol):
    """One batch loop. Not thread-safe: every method is called from the worker's loop thread.

    The methods with a result here are those of an engine that caches nothing, has no pages, and
    waits for input only.
    """

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if it can never fit."""
        ...

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        """Append input and return how many of its rows are reused from the session. Unknown (ended)
        requests are ignored.
        """
        ...

    def use_drafter(self, name: str) -> None:
        """Let another drafter guess from the next step on, `off`: none. Raises: BadInput for a name
        that the engine lacks.
        """
        if name != OFF:
            raise BadInput(
                f"drafter: this engine has none, {name!r} neither; use {OFF}", param="drafter"
            )

    def forget_samples(self) -> int:
        """Forget all samples that a trainer holds; return their number."""
        return 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """Make `step()` skip a request (which has no credit), or resume it."""
        ...

    def is_ready(self) -> bool:
        """Return True if `step()` would run a pass now."""
        ...

    def due_in_s(self) -> float:
        """Return the seconds until `is_ready()` with the input so far: 0 if ready now, infinite if
        more input is needed.
        """
        return 0.0 if self.is_ready() else math.inf

    def await_pass(self, timeout_s: float) -> bool:
        """Wait until a pass ends that other processes compute; return False if there is none, or if
        the time is over.
        """
        return False

    def accepts_requests(self) -> bool:
        """Return False while nothing can be computed, so that other workers should have new
        requests.
        """
        return True

    def outage(self) -> FleetError | None:
        """Return the error for all requests if nothing could be computed for too long."""
        return None

    def take_suspects(self) -> Sequence[RequestId]:
        """Return, once, the requests of passes that ran when another process died that computes
        parts of them.

        Until the call nothing of those passes is sent to the process that takes its place.
        """
        return ()

    def step(self) -> Sequence[EngineOutput]:
        """Run one batch pass over every ready request (bounded by the batch and prefill-chunk
        limits).

        A failure of one request is an output with `error`; the others continue.
        """
        ...

    def finish(self, request_id: RequestId) -> None:
        """End a request early but normally (a stop string, or a hand-off): no more outputs, memory
        freed or cached.
        """
        ...

    def num_cached_rows(self, session: str) -> int:
        """Return the number of rows cached for a session. Cached rows are dropped whenever a
        request needs the memory.
        """
        return 0

    def drop_cached(self, session: str | None = None) -> None:
        """Drop the cached rows of a session, or of all sessions."""

    def session_limits(self) -> SessionLimits | None:
        """Return which sessions can be saved and loaded; None if none can."""
        return None

    def begin_save(self, session: str) -> None:
        """Begin to copy the cached rows of a session. Raises: BadInput if none are cached, or if
        the engine has no copies.
        """
        raise BadInput("this engine does not save sessions")

    def begin_load(self, session: str, saved: SavedSession) -> None:
        """Begin to cache rows as those of a session.

        Raises: BadInput for rows that are not whole, OutOfPages; what is cached stays then.
        """
        raise BadInput("this engine does not load sessions")

    def take_copied(self) -> Sequence[SessionCopied]:
        """Return the copies of sessions that have ended."""
        return ()

    def export_kv(self, request_id: RequestId) -> KVBlocks | None:
        """Return a request's computed rows, or where they are, for `import_kv` of another engine;
        None if there are none.
        """
        return None

    def hand_off_bytes(self, num_rows: int) -> int:
        """Return the size of `export_kv` of a request with `num_rows` computed rows, as far as the
        engine holds as many.
        """
        return 0

    def kv_memory(self) -> Memory | None:
        """Return the memory of the pages, if another process can read it."""
        return None

    def lend_pages(self, request_id: RequestId) -> KVPages | None:
        """Finish a request and lend its pages for another engine to read, until `free_pages`.

        Return None without effect if nothing is computed or the pool is short of pages.
        """
        return None

    def reserve_pages(self, num_rows: int) -> KVPages | None:
        """Reserve pages to read `num_rows` rows into, until `import_kv` or `free_pages`; None if
        the pool is short of pages.
        """
        return None

    def free_pages(self, pages: KVPages) -> None:
        """Free pages that were lent or reserved, and that no engine reads or writes any more."""

    def import_kv(self, request_id: RequestId, blocks: KVBlocks | KVPages) -> bool:
        """Import another engine's rows for a request that was fed and has not begun; reserved pages
        then belong to the request.

        Return False if that is impossible: the rows are computed, with the same result.
        """
        return False

    def abort(self, request_id: RequestId) -> None:
        """Drop a request and free its memory. Idempotent; unknown ids are ignored."""
        ...

    def check(self) -> None:
        """Raise EngineStopped if the engine can compute nothing any more, for any request. Called
        after failures only.
        """
        ...

    def stats(self) -> EngineStats: ...
