"""The contract of a stage's adapter, and what a stage builder returns. It knows no Redis and no transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from fleet.core.ids import EdgeName, StageName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeItem:
    """One item for an output edge, before the chunk policy groups items into chunks (arrays are joined along axis 0).

    `walk` is the producer's walk when it was made. `final` closes the edge; a final item may have no arrays.
    """

    edge: EdgeName
    walk: Walk
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    final: bool = False


LoggedOutput = Mapping[tuple[EdgeName, Walk], Arrays]
"""What a task has appended so far, by edge and by the walk in which it was made, joined along axis 0; without remote tensors."""
NO_OUTPUT: LoggedOutput = MappingProxyType({})


class TaskAdapter(Protocol):
    """One request's work in one stage."""

    def open(self, made: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """What to submit, and the inputs that come from the request itself. `made` becomes the engine's history."""
        ...

    def consume(self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool) -> Sequence[EngineInput]:
        """Turn one chunk, in index order, into engine inputs. `walk` is this stage's walk from this chunk on."""
        ...

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        """Turn one engine output into items. On `output.final` every output edge of the stage must get its final item."""
        ...

    def is_stopped(self) -> bool:
        """Whether the request has met its end by itself (a stop string): the worker then calls `engine.finish`."""
        ...


AdapterFactory = Callable[[RequestSpec, bytes | None], TaskAdapter]
"""(request, its blob) -> the task's adapter. The blob holds the request's audio prompts, float32 mono."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What a builder may know. Units: `prefill_chunk_tokens` per request and step; `kv_pages` of `page_size_tokens` positions.

    `window_ramp` is the codec stage's window sizes in frames, a pure function of frame index where numerics are invariant.
    """

    stage: StageName
    checkpoint: Path
    device: str = "cpu"
    dtype: str = "float32"
    numerics: str = "fast"
    max_batch: int = 16
    prefill_chunk_tokens: int = 256
    kv_pages: int = 512
    page_size_tokens: int = 16
    threads: int = 1
    window_ramp: tuple[int, ...] = (2, 4, 8, 16, 25)
    extra: dict[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """What a worker runs: one engine, a factory of adapters, and the names of the weights it loaded (for `fleet status`)."""

    engine: Engine
    adapter: AdapterFactory
    weight_names: tuple[str, ...] = ()


Builder = Callable[[BuildOptions], BuiltStage]
