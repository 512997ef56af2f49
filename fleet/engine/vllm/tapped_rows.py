"""vLLM connector that reads hidden states of the tapped layer ("tapped rows") from the pages in
which the model caches them, once per step.

The model runs a layer that only caches the hidden states it is given, in pages beside its keys and
values; so positions served from vLLM's prefix cache have hidden states too. Loaded by vLLM from its
engine arguments: one object plans in the scheduler, another reads in each worker. Source: vllm
0.32, distributed/kv_transfer/kv_connector/v1/base.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from fleet.engine.vllm.llm import TappedRows

LAYER = "fleet_tap"
"""Name of the layer that caches tapped hidden states; vLLM requires a number after it."""
NUM_PROMPT, ROW_POSITIONS = "fleet_num_prompt", "fleet_row_positions"
"""Keys in `SamplingParams.extra_args`: the length of the prompt, and the positions whose hidden
states are wanted, in order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Part of a prompt that a step computes, up to position `stop`. `slots`: cache slots with the
    hidden states of the wanted `positions` among the newly computed ones.
    """

    llm_id: str
    stop: int
    positions: list[int]
    slots: list[int]


@dataclass
class RowSpans(KVConnectorMetadata):
    spans: list[RowSpan] = field(default_factory=list[RowSpan])


@dataclass
class RowsRead(KVConnectorWorkerMetadata):
    """The hidden states that a vLLM worker has read in one step."""

    rows: list[TappedRows]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RowsRead":
        assert isinstance(other, RowsRead)
        return RowsRead(self.rows + other.rows)


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """A running prompt whose hidden states are wanted at positions `wanted`. `blocks`: blocks of
    the tapped layer's cache; positions before `reported` were read.
    """

    num_positions: int
    wanted: list[int]
    blocks: list[int]
    reported: int = 0


class TappedRowsConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM KV connector that reads hidden states of prompts; it transfers no keys or values between
    engines.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group, self._block_size = _tapped_group(kv_cache_config)
        self._prompts: dict[str, _Prompt] = {}
        self._pages = torch.empty(0)
        self._read: list[TappedRows] = []

    # In the scheduler.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RowSpans:
        scheduled, spans = scheduler_output.num_scheduled_tokens, RowSpans()
        for llm_id in scheduler_output.finished_req_ids:
            self._prompts.pop(llm_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._open(new)
            spans.spans += self._advance(
                new.req_id, new.num_computed_tokens + scheduled[new.req_id]
            )
        known = scheduler_output.scheduled_cached_reqs
        for llm_id, new_blocks, num_computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            prompt = self._prompts.get(llm_id)
            if prompt is None:
                continue
            blocks = new_blocks[self._group] if new_blocks else []
            prompt.blocks = (
                list(blocks) if llm_id in known.resumed_req_ids else prompt.blocks + list(blocks)
            )
            spans.spans += self._advance(llm_id, num_computed + scheduled[llm_id])
        return spans

    def _open(self, new: NewRequestData) -> None:
        """Start to follow a prompt that was scheduled for the first time, or again after a
        preemption.
        """
        extra = (new.sampling_params and new.sampling_params.extra_args) or {}
        if NUM_PROMPT not in extra:
            return
        begun = self._prompts.get(new.req_id)
        self._prompts[new.req_id] = _Prompt(
            num_positions=extra[NUM_PROMPT],
            wanted=extra[ROW_POSITIONS],
            blocks=list(new.block_ids[self._group]),
            reported=begun.reported if begun else 0,
        )

    def _advance(self, llm_id: str, num_computed: int) -> Sequence[RowSpan]:
        prompt = self._prompts.get(llm_id)
        if prompt is None:
            return ()
        start, stop = prompt.reported, min(num_computed, prompt.num_positions)
        if stop <= start:
            return ()
        prompt.reported = stop
        positions = [position for position in prompt.wanted if start <= position < stop]
        size = self._block_size
        slots = [prompt.blocks[position // size] * size + position % size for position in positions]
        return (RowSpan(llm_id=llm_id, stop=stop, positions=positions, slots=slots),)

    def get_num_new_matched_tokens(
        self, request: object, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: object, blocks: object, num_external_tokens: int
    ) -> None:
        """Do nothing, since no blocks are loaded."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, RowsRead):
            self._read += connector_output.kv_connector_worker_meta.rows

    def take(self) -> Sequence[TappedRows]:
        """Return, once, the hidden states that vLLM workers have read since the last call."""
        read, self._read = self._read, []
        return read

    def request_finished_all_groups(self, request: object, block_ids: object) -> tuple[bool, None]:
        return False, None

    # In a worker. All workers of a tensor-parallel model have equal rows: the first worker reads.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        [self._pages] = [kv_caches[name] for name in layers]  # [blocks, 1, block size, H]
        assert self._pages.shape[2] == self._block_size, (
            "the tapped layer's pages have another size than its group's blocks"
        )

    def wait_for_save(self) -> None:
        """Read the hidden states of this step's prompts by one copy from the device."""
        spans = self._get_connector_metadata().spans
        if not spans or get_tensor_model_parallel_rank():
            return
        slots = torch.tensor([slot for span in spans for slot in span.slots], dtype=torch.long).to(
            self._pages.device
        )
        rows = (
            self._pages[slots // self._block_size, 0, slots % self._block_size]
            .float()
            .cpu()
            .numpy()
        )
        for span in spans:
            positions = np.array(span.positions, np.int32)
            here, rows = rows[: len(positions)], rows[len(positions) :]
            self._read.append(
                TappedRows(
                    llm_id=span.llm_id, stop=span.stop, positions=positions, rows=here.copy()
                )
            )

    def build_connector_worker_meta(self) -> RowsRead | None:
        read, self._read = self._read, []
        return RowsRead(read) if read else None

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Do nothing, since no blocks are loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, since no blocks are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Do nothing: hidden states are read once per step, by `wait_for_save`."""


def _tapped_group(config: KVCacheConfig) -> tuple[int, int]:
    """Return the index of the KV cache group to which the tapped layer belongs, and the group's
    block size.
    """
    for number, group in enumerate(config.kv_cache_groups):
        if any(LAYER in name.split(".") for name in group.layer_names):
            return number, group.kv_cache_spec.block_size
    raise ValueError(f"the model has no layer {LAYER}")


def rows_of(connector: object) -> Callable[[], Sequence[TappedRows]]:
    """Return a function that takes the read hidden states from vLLM's connector, which is a
    `TappedRowsConnector` or a multi-connector that contains one.
    """
    connectors = connector._connectors if isinstance(connector, MultiConnector) else [connector]
    [tapped] = [each for each in connectors if isinstance(each, TappedRowsConnector)]
    return tapped.take
