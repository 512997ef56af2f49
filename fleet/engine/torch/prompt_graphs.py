"""Execution of prompt rows without the host: on a GPU the layers are replayed as a captured CUDA
graph, one graph per number of rows.

A row of a prompt is computed as the row of a decode step is: by itself, from its position, its slot
and the pages of its request. The keys and values of all rows are stored before attention, so that a
row sees the rows before it. Knows no sampling. Slow twin: `FastRunner`.
Legend: N rows of all requests, B rows of a captured step, the last ones padding; H hidden size, E
requests of a step, P pages of a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.cuda_graphs import GraphCapture
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent, positions_of, slots_of
from fleet.engine.torch.passes import PassRows, concatenated, first_rows, tiles
from fleet.engine.torch.program import Forwarded, GraphProgram, GraphTaskT
from fleet.engine.torch.rows import joined
from fleet.engine.torch.step_inputs import RowInputs

PROMPT_BUCKETS = (16, 32, 64, 128, 256, 512)
"""Numbers of rows for which graphs are captured. More rows are computed in pieces."""
MAX_READS = 1 << 21
"""Largest number of positions that the rows of a captured step attend to, all rows together: each
row reads its context by itself. 512 rows at position 4096 read 4 GiB of keys and values in each
layer of the Thinker, about 1 ms of an H200's bandwidth (estimated, not measured); eager attention
reads a context once for all rows.
"""
POSITION, SLOT, OWNER, NUM_PLACES = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInputs:
    """Inputs of a captured forward step. `rows_BH`: embeddings; `positions_B`: positions of the
    rows; `slots_B`: KV pool slots of the rows; `tables_EP`: page tables, as many as rows;
    `owners_B`: number of each row's page table.
    """

    rows_BH: Tensor
    positions_B: Tensor
    slots_B: Tensor
    owners_B: Tensor
    tables_EP: Tensor

    def rows(self) -> RowInputs:
        """Return the inputs with a page table for each row."""
        return RowInputs(
            rows_BH=self.rows_BH,
            positions_B=self.positions_B,
            slots_B=self.slots_B,
            pages_BP=self.tables_EP.index_select(0, self.owners_B),
        )


class PromptBuffers:
    """Input tensors of forward steps of up to `num_rows` rows. A smaller step uses the first rows
    of the same tensors.

    The host fills pinned memory, which is copied to the device's tensors without waiting. Filling
    the buffers again waits for these copies.
    """

    def __init__(self, hidden_size: int, pool: KVPool, num_rows: int, num_pages: int) -> None:
        device = pool.data.device
        self._pool = pool
        self._num_pages = num_pages
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        pin = self._copied is not None
        self._host_places = torch.zeros(num_rows, NUM_PLACES, dtype=torch.int64, pin_memory=pin)
        self._host_tables = torch.zeros(num_rows, num_pages, dtype=torch.int32, pin_memory=pin)
        self._places, self._tables = self._host_places.numpy(), self._host_tables.numpy()
        self._tables[:] = pool.scratch_page
        self._places[:, SLOT] = pool.scratch_page * pool.page_size
        self._device_places = self._host_places.to(device, copy=True)
        self._device_tables = self._host_tables.to(device, copy=True)
        self._rows = torch.zeros(num_rows, hidden_size, dtype=pool.data.dtype, device=device)

    def inputs(self, num_rows: int) -> PromptInputs:
        """Return the inputs of a step of `num_rows` rows: views of the buffers."""
        places = self._device_places[:num_rows]
        return PromptInputs(
            rows_BH=self._rows[:num_rows],
            positions_B=places[:, POSITION],
            slots_B=places[:, SLOT],
            owners_B=places[:, OWNER],
            tables_EP=self._device_tables[:num_rows],
        )

    def fill(self, rows_NH: Tensor, extents: Sequence[Extent], num_rows: int) -> None:
        """Fill the inputs of a step of `num_rows` rows: the rows of the extents, in order, then
        padding, which is computed at position 0 of the scratch page.
        """
        used, num_tables = len(rows_NH), len(extents)
        if self._copied is not None:
            self._copied.synchronize()
        self._places[:used, POSITION] = positions_of(extents)
        self._places[:used, SLOT] = slots_of(extents, self._pool)
        self._places[:used, OWNER] = [
            owner for owner, extent in enumerate(extents) for _ in range(extent.num_rows)
        ]
        for table, extent in zip(self._tables, extents, strict=False):
            pages = extent.table.pages[: self._num_pages]
            table[: len(pages)] = pages
            table[len(pages) :] = self._pool.scratch_page
        if used < num_rows:
            self._places[used:num_rows, POSITION] = 0
            self._places[used:num_rows, SLOT] = self._pool.scratch_page * self._pool.page_size
            # each extent has a row at least, so that a table is left for the padding
            self._places[used:num_rows, OWNER] = num_tables
            self._tables[num_tables] = self._pool.scratch_page
            num_tables += 1
        self._device_places[:num_rows].copy_(self._host_places[:num_rows], non_blocking=True)
        self._device_tables[:num_tables].copy_(self._host_tables[:num_tables], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._pool.data.device))
        self._rows[:used].copy_(rows_NH)
        # a padding row writes to the scratch page, which must stay finite
        self._rows[used:num_rows].zero_()


class PromptSteps(Generic[GraphTaskT]):
    """Forward steps of prompt rows, padded to the next of `buckets`; more rows than the largest are
    computed in pieces, which is the same since each row sees the rows of earlier pieces.

    `compute`: function that computes the layers from a step's inputs; captured as graphs by
    `capture`, called directly if this is None. The page tables of a captured step cover the whole
    pool; otherwise they have the pages needed, rounded up to a power of two.
    """

    def __init__(
        self,
        program: GraphProgram[GraphTaskT],
        pool: KVPool,
        buckets: Sequence[int],
        capture: GraphCapture | None,
        is_fused: Callable[[int], bool] = lambda _: False,
        max_reads: int | None = MAX_READS,
    ) -> None:
        self._program, self._pool = program, pool
        self._max_reads = max_reads
        self._capture = capture
        self._is_fused = is_fused
        self._buckets = sorted(buckets)
        self._buffers: dict[int, PromptBuffers] = {}
        self._ready: dict[tuple[int, int], Callable[[], Forwarded]] = {}
        self.compute: Callable[[PromptInputs], Forwarded] = self._forward
        if capture is not None:
            # the largest first: the others then fit into its memory
            for num_rows in reversed(self._buckets):
                self._prepare(num_rows, pool.num_pages)

    def _forward(self, inputs: PromptInputs) -> Forwarded:
        rows = inputs.rows()
        is_fused = self._is_fused(len(rows.rows_BH))
        layout = StepLayout(self._pool, rows, is_fused=is_fused)
        return self._program.forward(rows.rows_BH, layout, ())

    def accept(self, extents: Sequence[Extent]) -> bool:
        """Return True if these extents can be computed here, False if only eagerly: if there are
        draft tokens, rotary embeddings that are scaled by length, hidden states for a trainer, or
        contexts of more than `max_reads` positions.
        """
        if not self._buckets or any(
            extent.drafts or extent.rope_len or extent.is_capture for extent in extents
        ):
            return False
        if self._max_reads is None:
            return True
        num_reads = sum(extent.num_rows * (extent.start + extent.stop) // 2 for extent in extents)
        return num_reads <= self._max_reads

    def rows_of(self, entries: Sequence[tuple[GraphTaskT, Extent]]) -> PassRows:
        """Compute the rows of all entries. The result has no hidden states for a draft head."""
        rows_NH = joined([task.rows(extent.start, extent.stop) for task, extent in entries])
        largest = self._buckets[-1]
        done = [
            self._piece(piece_NH, [extent for _, extent in piece])
            for piece_NH, piece in zip(rows_NH.split(largest), tiles(entries, largest), strict=True)
        ]
        return PassRows(
            forwarded=done[0] if len(done) == 1 else concatenated(done),
            first=first_rows([extent for _, extent in entries]),
        )

    def _piece(self, rows_NH: Tensor, extents: Sequence[Extent]) -> Forwarded:
        """Start a step and return copies of its outputs, since the next one overwrites them."""
        used = len(rows_NH)
        num_rows = next(bucket for bucket in self._buckets if bucket >= used)
        num_pages = self._num_pages(extents)
        run = self._prepare(num_rows, num_pages)
        self._buffers[num_pages].fill(rows_NH, extents, num_rows)
        done = run()
        return Forwarded(
            last_NH=done.last_NH[:used].clone(),
            tapped_NH=None if done.tapped_NH is None else done.tapped_NH[:used].clone(),
        )

    def _num_pages(self, extents: Sequence[Extent]) -> int:
        if self._capture is not None:
            return self._pool.num_pages
        return self._pool.rounded_pages_for(max(extent.stop for extent in extents))

    def _prepare(self, num_rows: int, num_pages: int) -> Callable[[], Forwarded]:
        """Return a function that runs the step of this size on its buffers; both are created at the
        first call.
        """
        if num_pages not in self._buffers:
            self._buffers[num_pages] = PromptBuffers(
                self._program.step_shape.hidden_size, self._pool, self._buckets[-1], num_pages
            )
        key = (num_rows, num_pages)
        if key not in self._ready:
            self._is_fused(num_rows)
            inputs = self._buffers[num_pages].inputs(num_rows)

            def run() -> Forwarded:
                return self.compute(inputs)

            self._ready[key] = run if self._capture is None else self._capture.captured(run)
        return self._ready[key]
