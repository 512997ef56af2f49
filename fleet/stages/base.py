"""The contract of a stage's adapter and builder. Knows no Redis and no transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from fleet.core.ids import EdgeName, Walk
from fleet.core.request import RequestSpec
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.records import TrainingRecords
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest
from fleet.spans.protocol.chain import RouteSlot

if TYPE_CHECKING:
    from fleet.spans.torch.model import SpanLayers


class EdgeItem(msgspec.Struct, frozen=True, kw_only=True):
    """Item of an output edge (a token, a codec frame), before the chunk policy groups items into
    chunks by joining their arrays along axis 0.

    `walk`: the producer's walk when it produced the item. `final`: the item closes the edge; it may
    have no arrays. `figures`: numbers about the request by name, such as the length of its prompt,
    that the item's chunk carries to the consumer.
    """

    edge: EdgeName
    walk: Walk
    arrays: Arrays = msgspec.field(default_factory=dict[str, np.ndarray])
    final: bool = False
    figures: dict[str, int] = {}


LoggedOutput = Mapping[tuple[EdgeName, Walk], Arrays]
"""Output that a task has already written to its edges' logs, by edge and walk: the arrays of all
chunks joined along axis 0, without remote tensors.
"""
NO_OUTPUT: LoggedOutput = MappingProxyType({})


class TaskAdapter(Protocol):
    """Conversion between the edges of one task and its engine: chunks to engine inputs, engine
    outputs to items.

    The default methods suit a stage without input edges that never ends a request by itself.
    """

    def may_open(self) -> bool:
        """Return False while the engine request depends on chunks that have not been consumed;
        until then `consume` returns no engine inputs, and `open` is not called.
        """
        return True

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request, and the engine inputs that are known from the request itself,
        such as the prompt. `logged`: output of an earlier owner, which becomes the engine's
        history.
        """
        ...

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        """Convert one chunk of an input edge to engine inputs. Called in index order. `walk`: walk
        of this stage from this chunk on. `final`: True for the last chunk of the edge.
        """
        raise AssertionError(f"this stage has no input edge, and got a chunk of {edge}")

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        """Convert one engine output to items. On `output.final` every output edge of the stage must
        get its final item.
        """
        ...

    def is_stopped(self) -> bool:
        """Return True if the adapter has ended the request (at a stop string): the worker then
        calls `engine.finish`.
        """
        return False


AdapterFactory = Callable[[RequestSpec, bytes | None], TaskAdapter]
"""Function that creates a task's adapter from the request and its blob (audio of the prompt,
float32 mono; None without audio).
"""


class HeadExchange(Protocol):
    """Interface through which a running stage replaces its draft head by another version. The
    format of packed heads is in `drafts/eagle3/files.py`.
    """

    @property
    def capacity_bytes(self) -> int:
        """Size in bytes of the largest packed head that this stage can use."""
        ...

    def prepare(self, data: bytes, sha256: str) -> object:
        """Load a packed head for a later `use`; may be called in any thread. `sha256`: expected
        hash of its weights. Raises: ConfigError if this stage cannot use the head.
        """
        ...

    def use(self, prepared: object, version: DraftVersion | None) -> None:
        """Draft with a head from `prepare` from the next step on; None restores the head with which
        the stage started. `version`: the version of that head; None for the first one. Called in
        the engine loop's thread.
        """
        ...

    def read_local(self, sha256: str) -> bytes | None:
        """Return the packed head with this hash that is stored on this host; None without one."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage that a worker can run: one engine, a factory of adapters, and the names of the
    weights it loaded.

    `num_added_rows`: most positions that the stage computes before its first output in addition to
    the request's prompt. `route`: slot in which an anchor's engine finds the connection to its span
    workers; None for other stages. `begin_training`: set for the trainer only; called with the
    fleet's training records once per incarnation of the worker. `heads`: set if the stage drafts
    with, or trains, versions of a draft head.
    """

    engine: Engine
    adapter: AdapterFactory
    num_added_rows: int = 0
    weight_names: tuple[str, ...] = ()
    route: RouteSlot | None = None
    begin_training: Callable[[TrainingRecords], None] | None = None
    heads: HeadExchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSpan:
    """A span that a span worker can host, with the size of its weights."""

    layers: "SpanLayers"
    num_bytes: int
