"""The contract between a worker and the batch loop inside it.

A worker submits requests, feeds them inputs in order, and calls `step()`; each call runs at most
one batch step and returns its outputs. What only some engines can do is a capability, an attribute
that is None without it (`fleet.engine.capabilities`). Knows no Redis, no edge and no stage: the
stage's adapter defines the meaning of arrays, which are numpy (host memory, C-contiguous).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

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
"""Name of the array of a sampled token: int32 [1]."""
NUM_POSITIONS = "num_positions"
"""Request parameter: the most positions that a request may take, prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Settings of one request. `params` are free-form strings for the model behind the engine (a
    voice, say).

    `history`: outputs that an earlier owner's engine sampled for this request, or that the request
    itself contains, from the first one on and joined along axis 0. The engine returns them again
    without sampling, and continues after them.
    `session`: name under which the computed rows are cached after a normal end; the next request of
    the session reuses the rows with which it begins. Without a name nothing is cached or reused.
    `captured`: names of the hidden states to return, from `fleet.core.captures`. A request with
    such names is a capture: the engine samples no token for it and returns these hidden states of
    every position, history included, float32 [n, width]. Captures are computed only in time that
    other requests leave free.
    """

    request_id: RequestId
    sampling: Sampling
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Arrays = field(default_factory=dict[str, np.ndarray])
    session: str = ""
    captured: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInput:
    """Next piece of a request's input, in the phase `walk`. Nothing may be fed after `final`."""

    walk: Walk
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    final: bool = False


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one step for one request, in order. `final` ends the request; `error` ends it
    early. `num_reused`: number of reused rows that `feed` could not know. An output without
    arrays that ends nothing follows the prompt in an engine that samples nothing: the request is
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
    """Use of an engine's KV pool; zeros without one. `pages_cached`: part of `pages_used` that
    caches prefixes of sessions. `rows_reused`: cached rows reused since the start.
    """

    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    rows_reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load of an engine. `running`: requests submitted and not ended; `ready`: requests that the
    next step can run.

    `spans`, the passes of an anchor, `speculation` and `training` are None in other engines.
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

    A capability is set by the constructor; None means that the engine lacks it.
    """

    kv: KVTransfer | None = None
    prefixes: CachedPrefixes | None = None
    sessions: SessionCopying | None = None
    background: BackgroundWork | None = None
    remote: RemotePasses | None = None
    drafters: DrafterSelection | None = None
    samples: SampleStore | None = None

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if it can never fit."""
        ...

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        """Append input and return how many of its rows are reused from the session. Unknown (ended)
        requests are ignored.
        """
        ...

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """Make `step()` skip a request (which has no credit), or resume it."""
        ...

    def is_ready(self) -> bool:
        """Return True if `step()` would compute now."""
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
        """End a request early but normally (a stop string, or a hand-off): no more outputs, memory
        freed or cached.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Drop a request and free its memory. Idempotent; unknown ids are ignored."""
        ...

    def check(self) -> None:
        """Raise EngineStopped if the engine can compute nothing any more, for any request. Called
        after failures only.
        """
        ...

    def stats(self) -> EngineStats: ...


def await_ready(engine: Engine, timeout_s: float) -> bool:
    """Return True if `step()` would compute now, after a wait for background work if necessary."""
    if engine.is_ready():
        return True
    return engine.background is not None and engine.background.await_pass(timeout_s)
