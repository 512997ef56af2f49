"""The contract of a stage's adapter and builder. Knows no Redis and no transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from fleet.core.ids import EdgeName, Walk
from fleet.core.request import RequestSpec
from fleet.drafts.trainer.records import TrainingRecords
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest
from fleet.spans.protocol.chain import RouteSlot

if TYPE_CHECKING:
    from fleet.spans.torch.model import SpanLayers


class EdgeItem(msgspec.Struct, frozen=True, kw_only=True):
    """Item of an output edge, before the chunk policy groups items into chunks (arrays are joined
    along axis 0).

    `walk` is the producer's walk when it produced the item. `final` closes the edge; a final item
    may have no arrays.
    """

    edge: EdgeName
    walk: Walk
    arrays: Arrays = msgspec.field(default_factory=dict[str, np.ndarray])
    final: bool = False


LoggedOutput = Mapping[tuple[EdgeName, Walk], Arrays]
"""Output of a task in the logs, by edge and walk, joined along axis 0; without remote tensors."""
NO_OUTPUT: LoggedOutput = MappingProxyType({})


class TaskAdapter(Protocol):
    """Work of a request in a stage; by default, of a stage without input edges that never ends a
    request by itself.
    """

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request, and the inputs from the request itself. `logged` becomes the
        engine's history.
        """
        ...

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        """Convert one chunk, in index order, to engine inputs. `walk` is this stage's walk from
        this chunk on.
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
"""Creates a task's adapter from a request and its blob, which holds the audio of the prompt,
float32 mono.
"""


class HeadExchange(Protocol):
    """Exchange of a stage's draft head for another version. Packed heads: see
    `drafts/eagle3/files.py`.
    """

    @property
    def capacity_bytes(self) -> int:
        """The size of the largest packed head."""
        ...

    def prepare(self, data: bytes, sha256: str) -> object:
        """Load a packed head; called in any thread. Raises: ConfigError if it cannot be used
        here.
        """
        ...

    def use(self, prepared: object, version: int) -> None:
        """Use a prepared head from the next step on; None: the head of the start. Called in the
        loop's thread.
        """
        ...

    def read_local(self, sha256: str) -> bytes | None:
        """Return a packed head that is stored on this host."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage that a worker can run: one engine, a factory of adapters, and the names of the
    weights it loaded.

    `num_added_rows`: the most positions that the stage computes before its first output, beside the
    request's prompt. `route`: slot in which an anchor's engine finds the chain of its span workers;
    None elsewhere. `begin_training`: only a trainer has it; each incarnation of the worker calls it
    with the fleet's records. `heads`: set if the stage drafts with, or trains, versions of a draft
    head.
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
