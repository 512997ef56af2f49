"""The contract of a stage's adapter and builder. Knows no Redis and no transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np

from fleet.core.ids import EdgeName, StageName, Walk
from fleet.core.request import RequestSpec
from fleet.drafts.trainer.records import TrainingRecords
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import Returned

if TYPE_CHECKING:
    from fleet.spans.torch.model import SpanLayers


class EdgeItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item for an output edge, before the chunk policy groups items into chunks (arrays are
    joined along axis 0).

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
    """One request's work in one stage; by default, of a stage without input edges that never ends a
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


Half = Literal["", "prefill", "decode"]
"""Which half of a split stage; "" for a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of the engine vllm. `kv_bytes`: memory for keys and values. `address` of this host,
    to the other half.
    """

    kv_bytes: int = 1 << 30
    tensor_parallel_size: int = 1
    quantization: str | None = None
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorOptions:
    """The part of a model that an anchor holds, and how it computes with its span workers.

    `returned`, `window`, `wire_dtype`, `keep_bytes`: see `SpanPassOptions`.
    """

    span: LayerSpan
    returned: Returned
    window: int | None = None
    wire_dtype: str = "float32"
    keep_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """`drafter`: its name, or `off`. `num_drafts`: the most for one request in one pass.
    `table_tokens`: see `AnswerTable`.

    `head`: folder of a draft head, for the drafter `eagle3`.
    """

    drafter: str
    num_drafts: int
    table_tokens: int = 0
    head: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of the trainer; see `TrainingConfig`. `num_slots`: the most samples that wait to be
    acknowledged. `margin`: None: the trainer promotes no version.
    """

    folder: Path
    num_slots: int
    window_samples: int = 8
    batch_samples: int = 2
    num_steps: int = 5
    learning_rate: float = 1e-3
    passes: int = 4
    checkpoint_windows: int = 16
    replay_samples: int = 2048
    replay_bytes: int = 1 << 30
    held_out: float = 0.1
    draft_vocab_size: int = 32_000
    margin: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a builder. Units: `prefill_chunk_tokens` per request and step; `kv_pages` of
    `page_size_tokens` positions.

    `kv_pages` 0: as many as `gpu_memory_utilization` of the device's memory holds beside the
    weights. `min_positions`: of the largest request that the deployment admits.
    `window_ramp`: the codec stage's window sizes in frames, a pure function of frame index if
    numerics are invariant. `progress` is called with the share of the weights that is loaded, 0 to
    1. `half` of a split stage. `anchor`: of one over span workers.
    `speculation`: None where drafts cannot be verified. `capture_share`: of its time for captures;
    None: it computes none.
    `most_draft_ids`: see `TrainingConfig.draft_vocab_size`.
    `training`: of the trainer.
    """

    stage: StageName
    checkpoint: Path
    device: str = "cpu"
    dtype: str = "float32"
    numerics: str = "fast"
    engine: str = "torch"
    vllm: VllmSettings = field(default_factory=lambda: VllmSettings())
    max_batch: int = 16
    prefill_chunk_tokens: int = 256
    kv_pages: int = 512
    gpu_memory_utilization: float = 0.9
    min_positions: int = 1
    page_size_tokens: int = 16
    threads: int = 1
    half: Half = ""
    anchor: AnchorOptions | None = None
    speculation: SpeculationOptions | None = None
    capture_share: float | None = None
    most_draft_ids: int = 32_000
    training: TrainingOptions | None = None
    window_ramp: tuple[int, ...] = (2, 4, 8, 16, 25)
    progress: Callable[[float], None] = lambda _: None
    extra: dict[str, str | int | float | bool] = field(
        default_factory=dict[str, str | int | float | bool]
    )


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
        """Use a prepared head from the next pass on; None: that of the start. Called in the loop's
        thread.
        """
        ...

    def read_local(self, sha256: str) -> bytes | None:
        """Return a packed head that is stored on this host."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage that a worker can run: one engine, a factory of adapters, and the names of the
    weights it loaded.

    `num_added_rows`: the most rows that the stage computes beside those of a request's prompt
    before its first output.
    `route`: of an anchor, where its engine finds the chain of its span workers. `begin_training`:
    of a trainer; called with the fleet's records by each incarnation of the worker. `heads`: of a
    stage that drafts with, or trains, versions of a draft head.
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
    """A span that a span worker can host. `num_bytes`: of its weights."""

    layers: "SpanLayers"
    num_bytes: int


SpanBuilder = Callable[[BuildOptions, LayerSpan], BuiltSpan]
Builder = Callable[[BuildOptions], BuiltStage]
