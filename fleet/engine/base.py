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
from fleet.core.request import Sampling

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request's settings. `params` are free-form strings that only the model behind the engine reads (a voice, say).

    `history` is what an earlier owner's engine drew for this request, from the first on and joined along axis 0: it is not drawn
    again but returned again, and what follows continues it. Empty for a request that begins.
    """

    request_id: RequestId
    sampling: Sampling
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Arrays = field(default_factory=dict[str, np.ndarray])


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
class EngineStats:
    """`running` requests are held; `ready` could take part in the next step. Pages are 0 for an engine without a KV pool."""

    running: int
    ready: int
    pages_used: int = 0
    pages_total: int = 0


class Engine(Protocol):
    """One batch loop. Not thread-safe: every method is called from the worker's loop thread."""

    def submit(self, request: EngineRequest) -> None:
        """Take a request. Raises: OutOfPages when it could never fit."""
        ...

    def feed(self, request_id: RequestId, piece: EngineInput) -> None:
        """Append input. A request unknown (ended, aborted) is ignored."""
        ...

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """A paused request (no credit downstream) is skipped by `step()`; the batch goes on without it."""
        ...

    def ready(self) -> bool:
        """Whether `step()` would run a pass now."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Run one batch pass over every ready request (bounded by the batch and prefill-chunk limits).

        A failure of one request is an output with `error`; the others go on.
        """
        ...

    def finish(self, request_id: RequestId) -> None:
        """End a request early but normally (a stop string was met, or another goes on with it): no more outputs, memory freed."""
        ...

    def export(self, request_id: RequestId) -> KVBlocks | None:
        """A copy of what is computed of a request, for another engine to adopt; None where there is nothing."""
        ...

    def adopt(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        """Take over what another engine computed, for a request that was fed and has not begun. Whether that was possible: if
        not, it is computed here, which takes longer and changes nothing.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget a request and free its memory. Idempotent; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...
