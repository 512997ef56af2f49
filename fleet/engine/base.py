"""Interface of an engine: the batch loop inside a worker.

A worker submits requests, feeds them inputs in order, and calls `step()`; each call runs at most
one batch step and returns its outputs. What only some engines can do is a capability: an attribute
that is None in the other engines (`fleet.engine.capabilities`). Knows no Redis, no edge and no
stage: the stage's adapter defines the meaning of arrays, which are numpy (host memory,
C-contiguous).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.drafts.figures.training import TrainingFigures
from fleet.engine.capabilities import (
    BackgroundWork,
    CachedPrefixes,
    DrafterSelection,
    KVTransfer,
    RemotePasses,
    SampleStore,
    SessionCopying,
)
from fleet.spans.protocol.figures import SpanFigures

Arrays = Mapping[str, np.ndarray]
TOKEN = "token"
"""Name of the output array that holds a sampled token: int32 [1]."""
NUM_POSITIONS = "num_positions"
"""Request parameter: the largest number of positions (prompt and answer) that a request may
take.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Settings of one request. `params` are free-form strings for the model behind the engine (a
    voice, say).

    `history`: outputs that an earlier owner's engine sampled for this request, or that the request
    itself contains, from the first one on and joined along axis 0. The engine returns them again
    without sampling, and continues after them.
    `session`: name under which the request's keys and values are cached after a normal end; the
    next request of the session reuses them for the positions at which both begin alike. With an
    empty name nothing is cached or reused.
    `captured`: names of the hidden states to return, from `fleet.core.captures`. For a request with
    such names (a hidden-state sample) the engine samples no token and returns these hidden states
    of every position, history included, float32 [n, width]. Such requests are computed only in time
    that other requests leave free.
    `open_rule`: returns a new rule for the tokens of the answer; None without one. The engine adds
    every token to the rule, history included.
    """

    request_id: RequestId
    sampling: Sampling
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Arrays = field(default_factory=dict[str, np.ndarray])
    session: str = ""
    captured: tuple[str, ...] = ()
    open_rule: "Callable[[], TokenRule] | None" = None


class TokenRule(Protocol):
    """Rule for the tokens of one answer. Legend: V vocabulary."""

    @property
    def error(self) -> FleetError | None:
        """Reason for which the rule cannot be kept any more: a token broke it, or it is too
        complex. The value is None while the rule can be kept. An answer whose rule has an error
        fails.
        """
        ...

    def allowed(self, drafts: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which ids may follow the answer and `drafts`, bool [V], or None if the token after
        `drafts` is not needed because the drafts break the rule or the rule has an `error`.
        """
        ...

    def add(self, token: int) -> None:
        """Append a token to the answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInput:
    """Next piece of a request's input, in the phase `walk`. `final` marks the last piece, after
    which nothing may be fed.
    """

    walk: Walk
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    final: bool = False


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one step for one request; outputs of a request are in order. `final` or an `error`
    ends the request. `num_reused`: number of positions whose cached keys and values were reused, in
    addition to those that `feed` has returned. An engine that samples nothing returns an output
    without arrays, neither `final` nor an `error`, once the prompt is computed: the request is
    ready to be handed off.
    """

    request_id: RequestId
    walk: Walk
    arrays: Arrays = msgspec.field(default_factory=dict[str, np.ndarray])
    final: bool = False
    error: FleetError | None = None
    num_reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """Use of an engine's KV pool; all values are 0 in an engine without a pool. `pages_cached`:
    part of `pages_used` that caches prefixes of sessions. `rows_reused`: number of cached positions
    reused since the start.
    """

    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    rows_reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load of an engine. `running`: requests submitted and not ended; `ready`: requests that the
    next step can run.

    `spans` (statistics of steps that go through span workers), `speculation` and `training` are
    None in engines without these functions.
    """

    running: int
    ready: int
    kv: KVStats = KVStats()
    spans: SpanFigures | None = None
    speculation: SpeculationFigures | None = None
    training: TrainingFigures | None = None


class Engine(Protocol):
    """The batch loop of a stage. Not thread-safe: every method is called from the worker's loop
    thread.

    Capabilities are attributes that the constructor sets; a capability that the engine lacks is
    None.
    """

    kv: KVTransfer | None = None
    prefixes: CachedPrefixes | None = None
    sessions: SessionCopying | None = None
    background: BackgroundWork | None = None
    remote: RemotePasses | None = None
    drafters: DrafterSelection | None = None
    samples: SampleStore | None = None

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if the KV pool could never hold it."""
        ...

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        """Append input to a request; return how many more of the request's positions are now reused
        from the session's cache. The input of an unknown request, for example an ended one, is
        ignored.
        """
        ...

    def num_unread(self, request_id: RequestId) -> int:
        """Return the number of fed pieces that the engine has not read yet, although no further
        input is needed for that; 0 for an unknown request. The worker acknowledges only pieces that
        were read. The default is for engines that read pieces at once.
        """
        return 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """Pause a request, for example one without credit, so that `step()` skips it; or resume
        it.
        """
        ...

    def is_ready(self) -> bool:
        """Return True if `step()` would compute or return something now."""
        ...

    def due_in_s(self) -> float:
        """Return the seconds until `is_ready()` with the input so far: 0 if ready now, infinite if
        more input is needed.
        """
        return 0.0 if self.is_ready() else math.inf

    def step(self) -> Sequence[EngineOutput]:
        """Run one batch step over every ready request (bounded by the batch and prefill-chunk
        limits).

        A failure of one request is an output with `error`; the others continue.
        """
        ...

    def finish(self, request_id: RequestId) -> None:
        """End a request early but normally (at a stop string, or for a hand-off): it has no more
        outputs, and its memory is freed, or cached for its session.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Drop a request and free its memory. Idempotent; unknown ids are ignored."""
        ...

    def check(self) -> None:
        """Raise EngineStopped if the engine can no longer compute any request, for example since
        its device failed. Called only after a failure.
        """
        ...

    def stats(self) -> EngineStats: ...


def await_ready(engine: Engine, timeout_s: float) -> bool:
    """Return True if `step()` would compute or return something now. If not, wait up to `timeout_s`
    for work in the background, and return True if a part of that work has ended.
    """
    if engine.is_ready():
        return True
    return engine.background is not None and engine.background.await_pass(timeout_s)
