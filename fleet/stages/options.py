"""Options of a stage's builder: the deployment, and facts of this process. Knows no builder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleet.config import FleetConfig, StageConfig
from fleet.config.placement import default_share
from fleet.config.rules import needed_positions
from fleet.config.stage_schema import (
    KV_PAGES,
    MIN_CHUNK_TOKENS,
    PREFILL_CHUNK_TOKENS,
    SpeculationConfig,
)
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.graphs import Stage
from fleet.graphs.base import FP8
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import Returned

Half = Literal["", "prefill", "decode"]
"""Which half of a split stage a worker serves; "" if the stage is whole."""


def compute_dtype_of(dtype: str) -> str:
    """Return the dtype in which a stage with this dtype or precision computes, as a name."""
    return "bfloat16" if dtype == FP8 else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorOptions:
    """Options of an anchor: its span of the model's layers, and how it computes with its span
    workers.

    `returned`, `window`, `wire_dtype`, `keep_bytes`: see `SpanPassOptions`.
    """

    span: LayerSpan
    returned: Returned
    window: int | None = None
    wire_dtype: str = "float32"
    keep_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options with which this process builds one stage of a deployment.

    Settings are read from `config` (the deployment) or `own` (the stage's section); the properties
    compute defaults that depend on the device or on other settings. `half`: half of a split stage
    that the worker serves. `dtype`: dtype, or the precision fp8. `anchor`: set if the stage's
    layers are divided. `address`: address of this host, to which the other half connects.
    `progress`: function called with the loaded share of the weights, 0 to 1.
    """

    config: FleetConfig
    stage: StageName
    checkpoint: Path
    device: str = "cpu"
    dtype: str = "float32"
    half: Half = ""
    anchor: AnchorOptions | None = None
    address: str = "127.0.0.1"
    progress: Callable[[float], None] = lambda _: None

    @property
    def own(self) -> StageConfig:
        return self.config.stage(self.stage)

    @property
    def declared(self) -> Stage:
        return self.config.graph_declaration().stage(self.stage)

    @property
    def engine(self) -> str:
        return self.config.engine_of(self.stage)

    @property
    def compute_dtype(self) -> str:
        """The dtype of hidden states, keys and values, and of weights that are not rounded."""
        return compute_dtype_of(self.dtype)

    @property
    def device_kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def prefill_chunk_tokens(self) -> int:
        """Most prompt tokens of one request in one step. The default shrinks with the number of
        processes that divide the layers: these work on different steps at once, and smaller steps
        fill the pipeline sooner.
        """
        own = self.own
        num_processes = 1 + (own.spans.num_workers if own.spans is not None else 0)
        default = max(MIN_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS[self.device_kind] // num_processes)
        return own.prefill_chunk_tokens or default

    @property
    def kv_pages(self) -> int:
        """Number of KV pages of `page_size_tokens` positions; 0 to fill the
        `gpu_memory_utilization` share of the device's memory that the weights leave.
        """
        fills_gpu = self.device_kind == "cuda" and self.engine == "torch"
        return self.own.kv_pages or (0 if fills_gpu else KV_PAGES)

    @property
    def gpu_memory_utilization(self) -> float:
        share = self.own.gpu_memory_utilization
        return default_share(self.config, self.device) if share is None else share

    @property
    def min_positions(self) -> int:
        """Positions of the largest request that the deployment admits."""
        needed = needed_positions(self.config, self.declared)
        return max((positions for positions, _ in needed), default=1)

    @property
    def speculation(self) -> SpeculationConfig | None:
        """Speculation settings of the stage; None where drafts cannot be verified, and for the
        prefill half of a split stage.
        """
        divided = self.own.spans is not None or self.anchor is not None
        on_kernels = self.config.numerics == "invariant" and self.device_kind == "cuda"
        verifies = self.declared.verifies_drafts and not divided and not on_kernels
        if not verifies or self.half == "prefill":
            return None
        return self.own.speculation

    @property
    def capture_share(self) -> float | None:
        """Share of its time, 0 to 1, that the stage may spend on hidden-state samples for training
        while answers wait; None if it computes no samples.
        """
        training = self.config.training
        return training.compute_share if training.enabled and self.declared.main else None

    @property
    def window_ramp(self) -> tuple[int, ...]:
        """Sizes of a codec stage's decoding windows in frames, by window index; the last size
        repeats.
        """
        edges = self.config.graph_declaration().edges_to(self.stage)
        ramps = [edge.name for edge in edges if edge.policy.kind == "ramp"]
        return self.config.window_ramp(ramps[0]) if ramps else (1,)

    def refusal(self, key: str, message: str) -> ConfigError:
        """Return the error of a key of the stage's section, such as `kv_pages`."""
        field = f"stages.{self.stage}.{key}"
        return ConfigError(f"{field}: {message}", param=field)
